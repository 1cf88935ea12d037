"""report.png: accuracy or fidelity of runs against MACs, with the front, for slides and papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corp_cli.report.page.charts import measures, trade
from corp_cli.report.plots import write_figure
from corp_cli.report.schema import Report

PICTURE = "report.png"


def write_picture(reports: Sequence[Report], path: Path, key: str) -> None:
    """Write the picture, whole or not at all. Raises CorpError, naming the `key` of its folder, if that fails."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    measure = measures(reports)[0]
    shown, figure = trade(reports, measure), Figure(figsize=(6.4, 4), layout="constrained")
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
    write_figure(figure, path, key, dpi=200)
