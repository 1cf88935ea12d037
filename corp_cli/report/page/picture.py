"""report.png: accuracy or fidelity of runs against MACs, with the front, for slides and papers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.files.output import appearing, cannot_write
from corp_cli.report.page.charts import measures, trade
from corp_cli.report.schema import Report

PICTURE = "report.png"
MISSING = "matplotlib"  # what it is drawn with: the extra `plots`


def can_draw() -> bool:
    """Whether the package that draws is installed."""
    return find_spec(MISSING) is not None


def write_picture(reports: Sequence[Report], path: Path, key: str) -> None:
    """Write the picture, whole or not at all. Raises CorpError, naming the `key` of its folder, if that fails."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    measure = measures(reports)[0]
    shown, figure = trade(reports, measure), Figure(figsize=(6.4, 4), dpi=200, layout="constrained")
    axes: Any = figure.subplots()
    runs = shown["runs"]
    series = (  # label, points, how they look
        ("dense", shown["dense"], {"marker": "D", "color": "black"}),
        ("cut, not repaired", shown["cut"], {"marker": "^", "color": "#c2500a", "markerfacecolor": "white"}),
        ("runs" if len(reports) > 1 else "pruned", [one for one in runs if one], {"marker": "o", "color": "#58626d"}),
        ("front", [runs[i] for i in shown["front"]], {"marker": "o", "color": "#0067a8", "linestyle": "-"}),
    )
    for label, points, style in series:
        if points and (label != "front" or len(reports) > 1):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, label=label, **{"linestyle": "", **style})
    axes.set(xlabel="MACs of an image", ylabel=shown["axis"], yscale="log" if shown["log"] else "linear")
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", ncols=4, frameon=False)
    try:
        with appearing(path) as partial:
            figure.savefig(partial)
    except OSError as error:
        raise CorpError(cannot_write(path, error, key)) from error
