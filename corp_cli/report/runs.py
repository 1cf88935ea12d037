"""Many runs side by side: found below folders, by the settings in which they differ, and their figures as a table.

Imports no torch.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from corp_cli.errors import CorpError
from corp_cli.files.output import REPORT, write_whole
from corp_cli.report.gate_input import measured
from corp_cli.runtime import console

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


@dataclass(frozen=True)
class Run:
    """What is compared of one report, and all of it."""

    folder: str  # within the ones that were asked for
    settings: dict[str, Any]  # by dotted key
    figures: dict[str, Any]  # by column
    content: dict[str, Any]


def amount(number: float) -> str:
    """`number` in four digits: 492.0 k, 6.965 M, 1.254 G."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:#.4g} {suffix}"
    return f"{number:g}"


def figures_of(content: Any, name: str) -> dict[str, Any]:
    """column → figure, None where it was not measured, of the JSON `content` of the report `name`.

    Raises CorpError where it is no report of this version.
    """
    figures = measured(content, name).figures
    return {column: figures[figure] for column, figure in COLUMNS.items()}


def shown(figures: Mapping[str, Any]) -> list[str]:
    """The cells of a table below the headings of SHOWN."""
    return ["-" if figures[name] is None else form.format(figures[name]) for name, form in SHOWN.values()]


def table(headings: list[str], rows: Iterable[tuple[list[str], list[str]]]) -> Table:
    """A table for the terminal: columns of words below `headings`, then of figures; every row has cells of both."""
    found = Table()
    for heading in headings:
        found.add_column(heading, overflow="fold")
    for heading in SHOWN:
        found.add_column(heading, justify="right", overflow="fold")
    for texts, figures in rows:
        found.add_row(*map(escape, texts), *figures)
    return found


def write_summary(
    columns: list[str], rows: Iterable[Mapping[str, Any]], path: Path, key: str = "hydra.run.dir"
) -> None:
    """Write a CSV file, whole or not at all. Raises CorpError, naming the `key` of its folder, where that fails."""

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    write_whole(path, write, key)


def write_runs(keys: list[str], runs: Iterable[Run], path: Path, key: str = "hydra.run.dir") -> None:
    """Write a CSV file of `runs`: the settings in which they differ, figures, and folders."""
    lines = [{**dict(zip([*keys, "folder"], words(one, keys), strict=True)), **one.figures} for one in runs]
    write_summary([*keys, *COLUMNS, "folder"], lines, path, key)


# --- which runs there are, and how they differ ----------------------------------------------------------------


def readable_runs(folders: Sequence[Path]) -> Iterator[Run]:
    """The runs whose report is in one of `folders` or below it; a warning names every report that cannot be compared.

    Their names are relative to what the folders have in common.
    """
    base, seen = Path(os.path.commonpath([folder.absolute() for folder in folders])), set()
    for folder in folders:
        for place, _, files in os.walk(folder):
            path = Path(place, REPORT)
            if REPORT not in files or path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                content = json.loads(path.read_text("utf-8"))
                figures = figures_of(content, str(path))
                if not isinstance(content.get("config"), dict):
                    raise CorpError(f"{path} lacks config.")
                settings = dict(flat(content["config"]))
            except OSError as error:
                console.warn(f"left out: {path} cannot be read ({error.strerror}).")
            except (ValueError, RecursionError) as error:  # JSON and UTF-8
                console.warn(f"left out: {path} is not whole JSON ({error}).")
            except CorpError as error:
                console.warn(f"left out: {error}")
            else:
                yield Run(console.readable(os.path.relpath(place, base)), settings, figures, content)


def flat(config: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is set in a config."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}", value


def ordered(runs: Iterable[Run]) -> tuple[list[str], list[Run]]:
    """(the keys that not all runs set to the same, in their order in the config; the runs sorted by them)."""
    found = list(runs)
    known = dict.fromkeys(key for one in found for key in one.settings)
    keys = [key for key in known if len({text(one.settings, key) for one in found}) > 1]
    found.sort(key=lambda one: ([rank(one.settings.get(key)) for key in keys], natural(one.folder)))
    return keys, found


def words(run: Run, keys: Iterable[str]) -> list[str]:
    """The settings of `run` for `keys` as they are typed, and its folder."""
    return [*(text(run.settings, key) for key in keys), run.folder]


def text(settings: Mapping[str, Any], key: str) -> str:
    """A setting as it is typed; empty where the run knew no such key."""
    value = settings.get(key, "")
    return console.readable(value) if isinstance(value, str) else json.dumps(value)


def rank(value: Any) -> tuple[int, float, list[tuple[int, str]]]:
    """What sorts numbers by value, then texts, those with numbers in them by these."""
    if isinstance(value, int | float):
        return 0, value, []
    return 1, 0, natural(str(value))


def natural(words: str) -> list[tuple[int, str]]:
    """What sorts job 10 behind job 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", words) if part]
