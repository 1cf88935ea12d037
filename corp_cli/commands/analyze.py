"""`corp analyze`: how redundant the blocks of a dense model are (the paper's Table 4), and its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from corp_cli.config.analyze import AnalyzeConfig
from corp_cli.config.images import CalibrationConfig
from corp_cli.config.shareable import shareable
from corp_cli.files.cache.cache import Cache, cached_statistics, opened
from corp_cli.files.output import write_json
from corp_cli.images.batches import resolve_device
from corp_cli.measure.redundancy import BlockAnalysis
from corp_cli.method.analyze import analyze
from corp_cli.method.calibrate import calibrate
from corp_cli.models.loaded import dense_model
from corp_cli.prepare import calibration_batches, calibration_images, draw_calibration
from corp_cli.report.plots import draw_analysis, picture
from corp_cli.report.report import image_facts, model_facts
from corp_cli.report.runs import write_summary
from corp_cli.report.schema import ANALYSIS, AnalysisReport
from corp_cli.runtime import console
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import halving_batches, plain_memory_errors

TABLE, FIGURE = "analysis.csv", "analysis.png"
GROUPS = frozenset({"mlp", "qk", "vo"})  # as of a run under a budget, which then finds the statistics in the cache
Column = tuple[str, Callable[[BlockAnalysis], Any], str]


def analyze_command(cfg: AnalyzeConfig, cache: Cache | None = None) -> AnalysisReport:
    """Analyze as `cfg` says. cache: where statistics are, besides calibration.cache."""
    watch, warnings = console.Stopwatch(("load", "calibrate", "analyze")), console.collect_warnings()
    with watch("load"):
        device = resolve_device(cfg.device)
        everything, loaded = calibration_images(cfg), dense_model(cfg.model, cfg.data, cfg.seed)
        images, _ = draw_calibration(everything, cfg.calibration, cfg.seed)
        model, blocks = loaded.model.to(device), loaded.blocks
        sets = images.calibration, images.spares
        cache = opened(cache or Cache(), cfg.calibration.cache, loaded, sets, GROUPS)

    def batched(work: Callable[..., Any]) -> Any:
        def on(c: CalibrationConfig) -> Any:
            return work(calibration_batches(images, loaded, c, cfg.seed))

        return halving_batches(on, cfg.calibration, "calibration")

    with watch("calibrate"):
        measure = partial(batched, lambda batches: calibrate(model, blocks, batches, GROUPS))
        statistics = cached_statistics(cache, loaded, images.calibrated, measure)
    with watch("analyze"):
        found = batched(lambda batches: analyze(model, blocks, statistics, batches, cfg.threshold))
    report = AnalysisReport(
        model=model_facts(loaded),
        config=asdict(cfg),
        seed=cfg.seed,
        environment=environment(device),
        calibration=image_facts(images.calibration, images.calibrated),
        threshold=cfg.threshold,
        blocks=found,
        stage_seconds=watch.seconds,
        peak_memory_mib=peak_memory_mib(device),
        warnings=warnings,
    )
    return shareable(report, cfg)


def write(report: AnalysisReport, folder: Path) -> list[str]:
    """Write analysis.json, analysis.csv and, with matplotlib, analysis.png into `folder` → their names."""
    write_json(asdict(report), folder / ANALYSIS)
    rows = [dict(flat(asdict(block))) for block in report.blocks]
    write_summary(list(dict.fromkeys(key for row in rows for key in row)), rows, folder / TABLE)
    drawn = picture(folder / FIGURE, (2, 3), partial(draw_analysis, report))
    return [ANALYSIS, TABLE, *([FIGURE] if drawn else [])]


def flat(content: dict[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, number) of a block; what was left out has none."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from flat(value, f"{parent}{key}.") if key != "left_out" else ()
        elif value is not None:
            yield f"{parent}{key}", value


def columns(part: str, *shown: tuple[str, str, str]) -> list[Column]:
    """Of one part of a block: heading, field and format of each column."""

    def of(field: str, block: BlockAnalysis) -> Any:
        found = getattr(block, part)
        return None if found is None else getattr(found, field)

    return [(heading, partial(of, field), form) for heading, field, form in shown]


RANK, K95 = ("rank", "rank_ratio", "{:.2f}"), ("k95", "k95_ratio", "{:.2f}")
MLP = columns(
    "mlp",
    ("dim", "channels", "{}"),
    ("eff.\nrank", "effective_rank", "{:.1f}"),
    ("rank\nratio", "rank_ratio", "{:.3f}"),
    ("k95", "k95", "{:.0f}"),
    ("k95\nratio", "k95_ratio", "{:.3f}"),
    ("act.\nsparsity", "sparsity", "{:.2f}"),
    ("near\ncopies", "near_duplicates", "{:.3f}"),
    ("largest\ncorr.", "largest_correlation", "{:.2f}"),
)
ATTENTION = [
    *(one for part in ("q", "k", "v") for one in columns(part, (f"{part}\n{RANK[0]}", *RANK[1:]), (f"{part}\nk95", *K95[1:]))),
    *columns("attention_entropy", ("entropy\nnats", "nats", "{:.2f}"), ("of\nlog N", "relative", "{:.2f}")),
]
RANKING = columns("qk_ranking", ("overlap at .5", "overlap", "{:.3f}"), ("Spearman", "spearman", "{:.3f}"))


def table(report: AnalysisReport, title: str, shown: list[Column]) -> Table:
    """A row for every block, `-` for what was left out."""
    found = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("block", no_wrap=True)
    for heading, _, _ in shown:
        found.add_column(heading, justify="right", no_wrap=True)
    for block in report.blocks:
        values = [(of(block), form) for _, of, form in shown]
        found.add_row(block.name, *("-" if value is None else form.format(value) for value, form in values))
    return found


def run(cfg: AnalyzeConfig, output_dir: Path) -> None:
    """`corp analyze`: measure, write, and show what was found."""
    with plain_memory_errors():
        report = analyze_command(cfg)
    files, out = write(report, output_dir), console.out()
    out.print(table(report, f"{report.model.source}: hidden channels of the MLP, behind the activation", MLP))
    out.print(table(report, "Queries, keys and values: ratios to the width of a head, means over heads", ATTENTION))
    out.print(table(report, "Activation and magnitude ranking of queries and keys, within a head", RANKING))
    for line in left_out(report):
        out.print(line, markup=False)
    out.print(
        f"Effective rank is the participation ratio of the covariance; an activation below {cfg.threshold:g} counts as "
        f"zero. {report.calibration.images} images of {report.calibration.source}.",
        markup=False,
    )
    out.print(f"Wrote {', '.join(files)} to {output_dir}.", markup=False)


def left_out(report: AnalysisReport) -> list[str]:
    """Why columns are empty, each reason once."""
    found = dict.fromkeys((part, why) for block in report.blocks for part, why in block.left_out.items())
    return [f"{part} is left out: {why}." for part, why in found]
