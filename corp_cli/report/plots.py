"""Pictures of results, by matplotlib, which is imported only to draw them: the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.files.output import appearing, cannot_write
from corp_cli.report.schema import AnalysisReport
from corp_cli.runtime import console

INCHES = 3.4, 2.8  # of one panel


def picture(path: Path, panels: tuple[int, int], draw: Callable[[Any], None]) -> bool:
    """Let `draw` fill a grid [rows, columns] of axes and write the PNG `path` → whether there is a matplotlib to do it.

    Where there is none, one line says how to get it. Raises CorpError if the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        said = f"corp: no {path.name}, which matplotlib draws; run: pip install 'matplotlib>=3.8,<4'"
        console.err().print(said, style="dim", markup=False)
        return False
    from matplotlib.figure import Figure  # without pyplot: no window, no state of its own

    rows, columns = panels
    figure = Figure(figsize=(columns * INCHES[0], rows * INCHES[1]), layout="constrained")
    draw(figure.subplots(rows, columns, squeeze=False))
    try:
        with appearing(path) as partial:
            figure.savefig(partial, dpi=150)
    except OSError as error:
        raise CorpError(cannot_write(path, error)) from error
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
        axis.set(xlabel="block", ylim=(0, 1.02))
        axis.legend(fontsize="small")
