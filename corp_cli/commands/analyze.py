"""`corp analyze`: how redundant the blocks of a dense model are (the paper's Table 4), and its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
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
from corp_cli.method.analyze import PROJECTIONS, analyze
from corp_cli.method.calibrate import calibrate
from corp_cli.models.loaded import dense_model
from corp_cli.prepare.batches import calibration_batches
from corp_cli.prepare.images import calibration_images, draw_calibration
from corp_cli.report.plots import draw_analysis, picture
from corp_cli.report.report import image_facts, model_facts
from corp_cli.report.runs import write_summary
from corp_cli.report.schema import ANALYSIS, AnalysisReport
from corp_cli.runtime import console
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import halving_batches, plain_memory_errors

TABLE, FIGURE = "analysis.csv", "analysis.png"
GROUPS = frozenset({"mlp", "qk", "vo"})  # as of a run under a budget, which then finds the statistics in the cache
Column = tuple[str, str, str, str]


@plain_memory_errors()
def analyze_command(cfg: AnalyzeConfig) -> AnalysisReport:
    """Analyze as `cfg` says."""
    watch, warnings = console.Stopwatch(("load", "calibrate", "analyze")), console.collect_warnings()
    with watch("load"):
        device = resolve_device(cfg.device)
        everything, loaded = calibration_images(cfg), dense_model(cfg.model, cfg.data, cfg.seed)
        images, _ = draw_calibration(everything, cfg.calibration, cfg.seed)
        model, blocks = loaded.model.to(device), loaded.blocks
        sets = images.calibration, images.spares
        cache = opened(Cache(), cfg.calibration.cache, loaded, sets, GROUPS, "float32")

    def batched(work: Callable[..., Any]) -> Any:
        def on(c: CalibrationConfig) -> Any:
            return work(calibration_batches(images, loaded, c, cfg.seed))

        return halving_batches(on, replace(cfg.calibration, batch_size=cfg.calibration.batch), "calibration")

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


def of_heads(key: str) -> list[Column]:
    """A column of queries, keys and values each, as a ratio to the width of a head."""
    return [(f"{part}\n{key}", part, f"{key}_ratio", "{:.2f}") for part in PROJECTIONS]


TABLES: dict[str, tuple[str, list[Column]]] = {  # name → title, and heading, part, field and format of each column
    "mlp": (
        "hidden channels of the MLP, behind the activation",
        [
            ("dim", "mlp", "channels", "{:.0f}"),
            ("eff.\nrank", "mlp", "effective_rank", "{:.1f}"),
            ("rank\nratio", "mlp", "rank_ratio", "{:.3f}"),
            ("k95", "mlp", "k95", "{:.0f}"),
            ("k95\nratio", "mlp", "k95_ratio", "{:.3f}"),
            ("act.\nsparsity", "mlp", "sparsity", "{:.2f}"),
            ("near\ncopies", "mlp", "near_duplicates", "{:.3f}"),
            ("largest\ncorr.", "mlp", "largest_correlation", "{:.2f}"),
        ],
    ),
    "attention": (
        "queries, keys and values, as ratios to the width of a head",
        [
            *of_heads("rank"),
            *of_heads("k95"),
            ("entropy\nnats", "attention_entropy", "nats", "{:.2f}"),
            ("of\nlog N", "attention_entropy", "relative", "{:.2f}"),
        ],
    ),
    "ranking": (
        "activation and magnitude ranking of queries and keys within a head",
        [
            ("overlap at .5", "qk_ranking", "overlap", "{:.3f}"),
            ("Spearman", "qk_ranking", "spearman", "{:.3f}"),
        ],
    ),
}


def table(report: AnalysisReport, name: str, paper: dict[str, dict[str, float]]) -> Table:
    """A row for every block, `-` for what was left out; where `paper` has numbers of it, these below."""
    title, shown = TABLES[name]
    found = Table(title=f"{report.model.source}: {title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("block", no_wrap=True)
    for heading, *_ in shown:
        found.add_column(heading, justify="right", no_wrap=True)
    for block in report.blocks:
        values = [getattr(getattr(block, part), field, None) for _, part, field, _ in shown]
        found.add_row(block.name, *cells(values, shown))
        if numbers := paper.get(block.name):
            found.add_row("  paper", *cells([numbers.get(field) for _, _, field, _ in shown], shown), style="dim")
    return found


def cells(values: list[float | None], shown: list[Column]) -> list[str]:
    """The cells of a row."""
    return ["-" if value is None else form.format(value) for value, (*_, form) in zip(values, shown, strict=True)]


def run(cfg: AnalyzeConfig, output_dir: Path) -> None:
    """`corp analyze`: measure, write, and show what was found."""
    show(analyze_command(cfg), output_dir, list(TABLES), {})


def show(report: AnalysisReport, folder: Path, names: list[str], paper: dict[str, dict[str, float]]) -> None:
    """Write the files, and print the tables `names`; `paper` has its numbers of the first by block."""
    files, out = write(report, folder), console.out()
    for name in names:
        out.print(table(report, name, paper if name == "mlp" else {}))
    reasons = dict.fromkeys((part, why) for block in report.blocks for part, why in block.left_out.items())
    for part, why in reasons:
        out.print(f"{part} is left out: {why}.", markup=False)
    out.print(
        f"Effective rank is the {report.effective_rank} of the covariance; an activation below {report.threshold:g} "
        f"counts as zero; {report.calibration.images} images of {report.calibration.source}.",
        markup=False,
    )
    out.print(f"Wrote {', '.join(files)} to {folder}.", markup=False)
