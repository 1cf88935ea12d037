"""Many runs side by side: the figures that summary.csv and the tables of several runs show. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from corp_cli.files.output import write_whole
from corp_cli.report.gate_input import measured

SUMMARY = "summary.csv"
COLUMNS = {  # of summary.csv → the figure of gate_input.Measured
    "parameters": "params",
    "macs": "macs",
    "top1": "top1",  # of the pruned model, percent
    "agreement": "agreement",  # percent
    "kl": "kl",
    "images_per_second": "throughput",
    "speedup": "speedup",
}
SHOWN = {  # heading → the column of summary.csv, and how it is shown
    "parameters": ("parameters", "{:,}"),
    "MACs": ("macs", "{:,}"),
    "top-1": ("top1", "{:.1f}%"),
    "KL": ("kl", "{:.3g}"),
    "images/s": ("images_per_second", "{:.0f}"),
}


def figures_of(content: Any, name: str) -> dict[str, Any]:
    """column → figure, None where it was not measured, of the JSON `content` of the report `name`.

    Raises CorpError where it is no report of this version.
    """
    figures = measured(content, name).figures
    return {column: figures[figure] for column, figure in COLUMNS.items()}


def shown(figures: Mapping[str, Any]) -> list[str]:
    """The cells of a table below the headings of SHOWN."""
    return ["-" if figures[name] is None else form.format(figures[name]) for name, form in SHOWN.values()]


def table(words: list[str], rows: Iterable[tuple[list[str], list[str]]]) -> Table:
    """A table for the terminal: columns of `words`, then of figures; every row has cells of both."""
    found = Table()
    for heading in words:
        found.add_column(heading, overflow="fold")
    for heading in SHOWN:
        found.add_column(heading, justify="right", overflow="fold")
    for texts, figures in rows:
        found.add_row(*map(escape, texts), *figures)
    return found


def write_summary(columns: list[str], rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a CSV file, whole or not at all. Raises CorpError if it cannot be written."""

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    write_whole(path, write)
