"""What a study found: its runs, their means over seeds, and the paper's numbers beside them. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from corp_cli.report.gate_input import at
from corp_cli.report.runs import amount, write_summary

PATHS = {  # column of results.csv → where report.json has it
    "parameters": "size.pruned.parameters",
    "macs": "size.pruned.macs",
    "top1": "evaluation.pruned.top1",
    "top5": "evaluation.pruned.top5",
    "agreement": "evaluation.pruned.agreement",
    "kl": "evaluation.pruned.kl",
    "images_per_second": "throughput.images_per_second.pruned",
    "speedup": "throughput.speedup",
}
OF_SIDE = {  # whose figures stand beside those of the pruned model, as dense_top1
    "dense": ("parameters", "macs", "top1", "top5", "images_per_second"),
    "uncompensated": ("top1", "top5", "agreement", "kl"),
}
OF_SIDES = tuple(
    (f"{side}_{name}", path.replace("pruned", side))
    for side in OF_SIDE
    for name, path in PATHS.items()
    if name in OF_SIDE[side]
)
COLUMNS = {**PATHS, **dict(OF_SIDES)}
TIMES = ("latency_ms", "latency_speedup", "dense_latency_ms")  # of bench.json


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {  # column → heading and format
    "parameters": ("params", amount),
    "macs": ("MACs", amount),
    "top1": ("top-1", "{:.1f}".format),
    "top5": ("top-5", "{:.1f}".format),
    "agreement": ("agree", "{:.1f}".format),
    "kl": ("KL", "{:.3g}".format),
    "images_per_second": ("img/s", "{:.0f}".format),
    "speedup": ("speed", "x{:.2f}".format),
    "latency_ms": ("ms", "{:.3g}".format),
    "latency_speedup": ("speed at 1", "x{:.2f}".format),
}


@dataclass(frozen=True)
class Outcome:
    """One run; no figures where it failed."""

    label: str
    value: float | None
    seed: int
    command: str
    folder: str
    seconds: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def name(self) -> str:
        """Of the row at this value, as in the paper's numbers of an experiment."""
        return self.label if self.value is None else f"{self.label} {self.value:g}"


@dataclass(frozen=True)
class Mean:
    """All seeds of a row at one value: means, and standard deviations of several."""

    label: str
    value: float | None
    name: str
    figures: dict[str, float]
    spread: dict[str, float]


def figures_of(report: Any, timing: Any) -> dict[str, Any]:
    """column → figure, None where it was not measured, of the contents of report.json and bench.json (or None)."""
    figures = {name: at(report, path) for name, path in COLUMNS.items()}
    settings = at(timing, "settings") or [None]
    figures["latency_ms"] = at(settings[0], "timings.pruned.p50_ms")
    figures["dense_latency_ms"] = at(settings[0], "timings.dense.p50_ms")
    figures["latency_speedup"] = at(settings[0], "speedup")
    return figures


def means(outcomes: Iterable[Outcome]) -> list[Mean]:
    """Over seeds, in the order of `outcomes`; runs that failed are left out."""
    by_name: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.error is None:
            by_name.setdefault(one.name, []).append(one)
    found = []
    for name, runs in by_name.items():
        columns = {key: [run.figures[key] for run in runs] for key in runs[0].figures}
        known = {key: values for key, values in columns.items() if None not in values}
        spread = {key: statistics.stdev(values) for key, values in known.items() if len(values) > 1}
        mean = {key: statistics.fmean(values) for key, values in known.items()}
        found.append(Mean(runs[0].label, runs[0].value, name, mean, spread))
    return found


def paper_of(paper: dict[str, Any], model: str) -> dict[str, dict[str, float]]:
    """row → figure → number of the paper for the timm name `model`; none where it has not got it."""
    return paper.get(model.partition(".")[0], {})


def write_results(outcomes: list[Outcome], paper: dict[str, dict[str, float]], path: Path) -> None:
    """A line for every run, the paper's numbers behind."""
    printed = list(dict.fromkeys(f"paper_{key}" for row in paper.values() for key in row))
    rows = [
        {"row": one.label, "x": one.value, "seed": one.seed, "status": "failed" if one.error else "ok"}
        | one.figures
        | {f"paper_{key}": number for key, number in paper.get(one.name, {}).items()}
        | {"seconds": one.seconds, "folder": one.folder, "command": one.command, "error": one.error}
        for one in outcomes
    ]
    figures = [*COLUMNS, *TIMES]
    write_summary(
        ["row", "x", "seed", "status", *figures, *printed, "seconds", "folder", "command", "error"], rows, path
    )


def table(title: str, found: list[Mean], paper: dict[str, dict[str, float]], shown: list[str]) -> Table:
    """The dense model, and every row: pruned, without repair where the accuracy is shown, and the paper's numbers."""
    grid = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("row", overflow="fold")
    for key in shown:
        grid.add_column(SHOWN[key][0], justify="right", no_wrap=True)

    def add(name: str, figures: dict[str, float], spread: dict[str, float], style: str = "") -> None:
        cells = []
        for key in shown:
            form = SHOWN[key][1]
            cell = form(figures[key]) if key in figures else ""
            cells.append(f"{cell} ±{form(spread[key])}" if key in spread and key in ("top1", "top5", "kl") else cell)
        grid.add_row(escape(name), *cells, style=style)

    def side(one: Mean, which: str) -> dict[str, float]:
        return {key: one.figures[f"{which}_{key}"] for key in shown if f"{which}_{key}" in one.figures}

    left = dict(paper)
    if found:
        add("dense", side(found[0], "dense"), {})
    if "dense" in left:
        add("  paper", left.pop("dense"), {}, "dim")
    for one in found:
        add(one.name, one.figures, one.spread)
        add("  without repair", side(one, "uncompensated"), {})
        if one.name in left:
            add("  paper", left.pop(one.name), {}, "dim")
    for name, numbers in left.items():
        add(f"{name}, paper", numbers, {}, "dim")
    return grid
