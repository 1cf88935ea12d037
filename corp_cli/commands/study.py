"""`corp study`: a table or figure of the paper again, on any model. Every row is a run of `corp prune`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from corp_cli.commands import analyze
from corp_cli.commands.bench import bench
from corp_cli.config.analyze import AnalyzeConfig
from corp_cli.config.checkpoints import BenchConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.config.shareable import shareable
from corp_cli.config.study import StudyConfig, X, slug
from corp_cli.errors import CorpError, stop_within
from corp_cli.files.cache.cache import Cache
from corp_cli.files.output import CHECKPOINT, REPORT, rounded
from corp_cli.files.owned import claim, clear
from corp_cli.pipeline import prune
from corp_cli.report.plots import draw_study, picture
from corp_cli.report.schema import BENCH
from corp_cli.report.study import SHOWN, Outcome, figures_of, means, paper_of, table, write_results
from corp_cli.runtime import console
from corp_cli.runtime.memory import plain_memory_errors, release

ROWS, RESULTS, SHARED = "rows", "results.csv", ".shared"
Compose = Callable[[Sequence[str], Sequence[str]], tuple[list[str], PruneConfig]]


@dataclass(frozen=True)
class Run:
    """One row at one value and seed: what `corp prune` is told, and where its results go within the study's folder."""

    label: str
    value: float | None
    seed: int
    command: str
    cfg: PruneConfig
    folder: str


def runs_of(cfg: StudyConfig, compose: Compose) -> Iterator[Run]:
    """Every run of a study, seed by seed, so that each set of calibration images is gone through at a time.

    Raises CorpError where `corp prune` would refuse a row, or a row does not say how much to remove.
    """
    study, only = cfg.experiment, [cfg.only] if isinstance(cfg.only, str) else cfg.only
    rows = [row for row in study.rows if only is None or any(str(part) in row.label for part in only)]
    if not rows:
        raise CorpError(f"only={cfg.only} names no row; there are {', '.join(row.label for row in study.rows)}.")
    composed = []
    for row in rows:
        values = study.values if row.values is None else row.values
        for value in (*values,) if values else (None,):
            text = "" if value is None else f"{value:g}"
            overrides, given = compose(study.overrides, [one.replace(X, text) for one in row.overrides])
            if not given.sparsity.named():
                raise CorpError(f"The row '{row.label}' does not say how much to remove, such as sparsity.mlp=0.5.")
            composed.append((row.label, value, f"{slug(row.label)}{text and f'-{text}'}", overrides, given))
    for seed in study.seeds:
        for label, value, name, overrides, given in composed:
            told = [*(one for one in overrides if not one.startswith("seed=")), f"seed={seed}"]
            command = shlex.join(["corp", "prune", *told])
            yield Run(label, value, seed, command, replace(given, seed=seed), f"{ROWS}/{name}-seed{seed}")


def done(run: Run, cfg: StudyConfig, folder: Path) -> bool:
    """Whether the results in `folder` are of this run, and all of them are there."""
    with suppress(OSError, ValueError, AttributeError):
        found = json.loads((folder / REPORT).read_text("utf-8")).get("config")
        asked = json.loads(json.dumps(rounded(shareable(asdict(run.cfg), run.cfg))))
        whole = not cfg.keep_weights or (folder / CHECKPOINT).is_file()
        return bool(found == asked and whole and (not cfg.experiment.latency or (folder / BENCH).is_file()))
    return False


def carry_out(run: Run, cfg: StudyConfig, folder: Path, cache: Cache) -> None:
    """Prune, time where that is asked for, and leave reports in `folder`."""
    (folder / BENCH).unlink(missing_ok=True)
    with plain_memory_errors():
        prune(run.cfg, folder, cache)
        if cfg.experiment.latency:
            given = BenchConfig(str(folder / CHECKPOINT), batch_sizes=[1], dtypes=["float32"], device=run.cfg.device)
            bench(given, folder)
    if not cfg.keep_weights:
        (folder / CHECKPOINT).unlink()
    release()


def outcome(run: Run, folder: Path, seconds: float | None, error: str | None = None) -> Outcome:
    """What is in the folder of a run, or why there is nothing."""
    figures = {}
    if error is None:
        paths = folder / REPORT, folder / BENCH
        figures = figures_of(*(json.loads(path.read_text("utf-8")) if path.is_file() else None for path in paths))
    return Outcome(run.label, run.value, run.seed, run.command, run.folder, seconds, figures, error)


def line(one: Outcome) -> str:
    """A run in one line."""
    if one.error is not None:
        return f"{one.name}, seed {one.seed}: failed: {one.error}"
    known = [key for key in ("macs", "top1", "agreement", "kl") if one.figures[key] is not None]
    figures = [f"{SHOWN[key][0]} {SHOWN[key][1](one.figures[key])}" for key in known]
    took = "was done before" if one.seconds is None else console.duration(one.seconds)
    return f"{one.name}, seed {one.seed}: {', '.join([*figures, took])}"


def run(cfg: StudyConfig, output_dir: Path, compose: Compose) -> None:
    """`corp study`: run what is not done yet, write, and show what was found.

    Raises CorpError where a row failed, after all others are done.
    """
    if cfg.experiment.analysis:
        return analyse(cfg, output_dir)
    runs, out = list(runs_of(cfg, compose)), console.out()
    if cfg.dry_run:
        for one in runs:
            out.print(one.command, markup=False)
        return None
    shared, found = claim(output_dir / SHARED), list[Outcome]()
    paper = paper_of(cfg.experiment.paper, cfg.model.name)
    for number, one in enumerate(runs, 1):
        folder, error, seconds = output_dir / one.folder, None, None
        if not done(one, cfg, folder):
            start = time.perf_counter()
            try:
                carry_out(one, cfg, folder, Cache(shared))
            except Exception as problem:  # of one row; the others go on
                if stop := stop_within(problem):
                    raise stop from problem
                kind = "" if isinstance(problem, CorpError) else f"{type(problem).__name__}: "
                error = " ".join(f"{kind}{problem}".split())
            seconds = time.perf_counter() - start
        found.append(outcome(one, folder, seconds, error))
        out.print(f"corp: {number} of {len(runs)}, {line(found[-1])}", markup=False)
        write_results(found, paper, output_dir / RESULTS)
    conclude(cfg, found, paper, output_dir)
    failed = [one for one in found if one.error is not None]
    if failed:
        raise CorpError(
            f"{len(failed)} of {len(runs)} rows failed, and {RESULTS} says why; the same command does only those again."
        )
    if shared is not None:
        clear(shared)
    return None


def conclude(cfg: StudyConfig, found: list[Outcome], paper: dict[str, dict[str, float]], folder: Path) -> None:
    """The figure, and the table for the console."""
    study, out, averages = cfg.experiment, console.out(), means(found)
    files = [RESULTS]
    if averages:
        out.print(table(f"{study.title}: {cfg.model.name}", averages, paper, study.show))
        drawing, name = partial(draw_study, study, averages, paper), f"{study.name}.png"
        files += [name] if picture(folder / name, (1, len(study.panels)), drawing) else []
    out.print(f"Wrote {', '.join(files)} to {folder}.", markup=False)


def analyse(cfg: StudyConfig, folder: Path) -> None:
    """A study of the dense model: tables of `corp analyze`, the paper's numbers below."""
    given = AnalyzeConfig(cfg.model, cfg.data, cfg.calibration, seed=cfg.seed, device=cfg.device)
    paper = paper_of(cfg.experiment.paper, cfg.model.name)
    if cfg.dry_run:
        return console.out().print("This study is one run of corp analyze, which cuts nothing.")
    analyze.show(analyze.analyze_command(given), folder, cfg.experiment.analysis, paper)
