"""Pictures of results, by matplotlib, which is imported only to draw them: the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corp_cli.config.study import ExperimentConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import appearing, cannot_write
from corp_cli.report.schema import AnalysisReport
from corp_cli.report.study import SHOWN, Mean
from corp_cli.runtime import console

MISSING = "matplotlib"  # where the extra is not installed
INCHES = 4.0, 3.2  # of one panel
LOGARITHMIC = 30  # largest over smallest x, from which on the axis is logarithmic
INSTEAD = {"top1": "agreement", "top5": "agreement"}  # of images without labels
Numbers = dict[str, dict[str, float]]  # of the paper, by row and figure


def can_draw() -> bool:
    """Whether the package that draws is installed."""
    return find_spec(MISSING) is not None


def write_figure(figure: Any, path: Path, key: str = "hydra.run.dir", dpi: int = 150) -> None:
    """Write a PNG, whole or not at all. Raises CorpError, naming the `key` of its folder, where that fails."""
    try:
        with appearing(path) as partial:
            figure.savefig(partial, dpi=dpi)
    except OSError as error:
        raise CorpError(cannot_write(path, error, key)) from error


def picture(path: Path, panels: tuple[int, int], draw: Callable[[Any], None]) -> bool:
    """Let `draw` fill a grid [rows, columns] of axes and write the PNG `path` → whether there is a matplotlib to do it.

    Where there is none, one line says how to get it. Raises CorpError if the file cannot be written.
    """
    if not can_draw():
        said = f"corp: no {path.name}, which matplotlib draws; run: pip install 'matplotlib>=3.8,<4'"
        console.err().print(said, style="dim", markup=False)
        return False
    from matplotlib.figure import Figure  # without pyplot: no window, no state of its own

    rows, columns = panels
    figure = Figure(figsize=(columns * INCHES[0], rows * INCHES[1]), layout="constrained")
    draw(figure.subplots(rows, columns, squeeze=False))
    write_figure(figure, path)
    return True


def draw_analysis(report: AnalysisReport, axes: Any) -> None:
    """The blocks of an analysis, first to last, on 2 x 3 axes: what is None has no point."""
    blocks = list(range(len(report.blocks)))

    def line(axis: Any, part: str, key: str, label: str) -> None:
        found = [getattr(block, part) for block in report.blocks]
        axis.plot(blocks, [None if one is None else getattr(one, key) for one in found], marker=".", label=label)

    panels = {"rank_ratio": "effective rank / width", "k95_ratio": "k95 / width", "sparsity": "activations near zero"}
    panels["largest_correlation"] = "largest correlation, mean"
    for axis, (key, title) in zip(axes.flat, panels.items(), strict=False):
        for part in ("mlp", "q", "k", "v"):
            line(axis, part, key, part)
        axis.set_title(title)
    line(axes.flat[4], "attention_entropy", "relative", "entropy / log N")
    axes.flat[4].set_title("attention entropy")
    line(axes.flat[5], "qk_ranking", "overlap", "overlap of kept halves")
    line(axes.flat[5], "qk_ranking", "spearman", "Spearman")
    axes.flat[5].set_title("activation and magnitude ranking")
    for axis in axes.flat:
        axis.set(xlabel="block", ylim=(-1.02 if axis is axes.flat[5] else 0, 1.02))
        axis.legend(fontsize="small")


def draw_study(study: ExperimentConfig, found: list[Mean], paper: Numbers, axes: Any) -> None:
    """Its panels: lines over x, or bars where rows have no value; what was not measured is left out.

    Full lines are pruned and repaired, dashed ones without repair, crosses the paper's, dotted the dense model.
    """
    for axis, asked in zip(axes[0], study.panels, strict=True):
        key = asked if any(asked in one.figures for one in found) else INSTEAD.get(asked, asked)
        draw = bars if all(one.value is None for one in found) else lines
        draw(axis, study.x, key, found, paper)
        if f"dense_{key}" in found[0].figures:
            axis.axhline(found[0].figures[f"dense_{key}"], color="grey", linestyle=":", label="dense")
        axis.set_ylabel(SHOWN[key][0])
        axis.legend(fontsize="x-small")
    axes[0][0].figure.suptitle(study.title, fontsize="medium")


def lines(axis: Any, x: str, key: str, found: list[Mean], paper: Numbers) -> None:
    """A colour for each row, its means joined in the order of x."""
    spread = 1.0
    for number, label in enumerate(dict.fromkeys(one.label for one in found)):
        colour, row = f"C{number}", [one for one in found if one.label == label]
        row = sorted((one for one in row if place(one, x) is not None), key=lambda one: place(one, x) or 0.0)
        at = [place(one, x) or 0.0 for one in row]
        spread = max([spread, *(at[-1] / one for one in at if one > 0)])
        errors = [one.spread.get(key, 0.0) for one in row]
        values = [one.figures.get(key) for one in row]
        if None not in values:
            axis.errorbar(at, values, errors if any(errors) else None, color=colour, marker=".", label=label)
        plain = [one.figures.get(f"uncompensated_{key}") for one in row]
        if None not in plain:
            axis.plot(at, plain, color=colour, marker=".", linestyle="--", alpha=0.5)
        printed = [
            (where, paper[one.name][key]) for where, one in zip(at, row, strict=True) if key in paper.get(one.name, {})
        ]
        if printed:
            axis.plot(*zip(*printed, strict=True), color=colour, marker="x", linestyle="", label=f"{label}, paper")
    if spread > LOGARITHMIC:
        axis.set_xscale("log")
    axis.set_xlabel("sparsity or size asked for" if x == "value" else SHOWN[x][0])


def place(one: Mean, x: str) -> float | None:
    """Where a row stands on the axis x."""
    return one.value if x == "value" else one.figures.get(x)


def bars(axis: Any, x: str, key: str, found: list[Mean], paper: Numbers) -> None:
    """Three bars for every row: repaired, without repair, and the paper's."""
    names = list(dict.fromkeys([*(one.name for one in found), *(name for name in paper if name != "dense")]))
    ours = {one.name: one for one in found}
    kinds = {
        "repaired": {name: one.figures.get(key) for name, one in ours.items()},
        "without repair": {name: one.figures.get(f"uncompensated_{key}") for name, one in ours.items()},
        "paper": {name: numbers.get(key) for name, numbers in paper.items()},
    }
    kinds = {kind: values for kind, values in kinds.items() if any(value is not None for value in values.values())}
    width = 0.8 / max(1, len(kinds))
    for number, (kind, values) in enumerate(kinds.items()):
        at = [place + width * (number - (len(kinds) - 1) / 2) for place in range(len(names))]
        axis.bar(at, [values.get(name) or 0.0 for name in names], width, label=kind)
    axis.set_xticks(range(len(names)), names, rotation=20, ha="right")
