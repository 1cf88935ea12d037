"""`corp summary`: all runs of corp prune below a folder side by side, however they were started. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corp_cli.config.summary import SummaryConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import REPORT
from corp_cli.report.runs import COLUMNS, SUMMARY, figures_of, shown, table, write_summary
from corp_cli.runtime import console


@dataclass(frozen=True)
class Run:
    """What is compared of one report."""

    folder: str  # within the one that was asked for
    settings: dict[str, Any]  # by dotted key
    figures: dict[str, Any]  # by column


def run(cfg: SummaryConfig, output_dir: Path) -> None:
    """Print the table of all runs below `cfg.folder`, and write it there as summary.csv.

    Raises CorpError where there is none, or where the file cannot be written.
    """
    folder = Path(str(cfg.folder))
    if not folder.is_dir():
        raise CorpError(f"folder={folder} is not a folder; give one with runs of corp prune below it.")
    runs = list(readable_runs(folder))
    if not runs:
        raise CorpError(f"There is no {REPORT} below {folder} that can be read; give a folder with runs of corp prune.")
    keys = differing(runs)
    runs.sort(key=lambda one: ([rank(one.settings.get(key)) for key in keys], natural(one.folder)))
    words = [[*(text(one.settings, key) for key in keys), one.folder] for one in runs]
    out = console.out()
    if not out.is_terminal:
        out.width = 160  # a log has no width
    out.print(table([*keys, "folder"], zip(words, (shown(one.figures) for one in runs), strict=True)))
    lines = [
        {**dict(zip([*keys, "folder"], cells, strict=True)), **one.figures}
        for cells, one in zip(words, runs, strict=True)
    ]
    write_summary([*keys, *COLUMNS, "folder"], lines, folder / SUMMARY)
    out.print(f"Wrote {SUMMARY} to {folder}, of {len(runs)} run{'s' if len(runs) > 1 else ''}.", markup=False)


def readable_runs(folder: Path) -> Iterator[Run]:
    """The runs whose report is in `folder` or below it; a warning names every report that cannot be compared."""
    for place, _, files in os.walk(folder):
        if REPORT not in files:
            continue
        path = Path(place, REPORT)
        try:
            content = json.loads(path.read_text("utf-8"))
            figures = figures_of(content, str(path))
            if not isinstance(content.get("config"), dict):
                raise CorpError(f"{path} lacks config.")
        except OSError as error:
            console.warn(f"left out: {path} cannot be read ({error.strerror}).")
        except (ValueError, RecursionError) as error:  # JSON and UTF-8
            console.warn(f"left out: {path} is not whole JSON ({error}).")
        except CorpError as error:
            console.warn(f"left out: {error}")
        else:
            yield Run(os.path.relpath(place, folder), dict(flat(content["config"])), figures)


def flat(config: dict[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is set in a config."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}", value


def differing(runs: list[Run]) -> list[str]:
    """The keys that not all runs set to the same, in their order in the config."""
    keys = dict.fromkeys(key for one in runs for key in one.settings)
    return [key for key in keys if len({text(one.settings, key) for one in runs}) > 1]


def text(settings: dict[str, Any], key: str) -> str:
    """A setting as it is typed; empty where the run knew no such key."""
    value = settings.get(key, "")
    return value if isinstance(value, str) else json.dumps(value)


def rank(value: Any) -> tuple[int, float, list[tuple[int, str]]]:
    """What sorts numbers by value, then texts, those with numbers in them by these."""
    if isinstance(value, int | float):
        return 0, value, []
    return 1, 0, natural(str(value))


def natural(words: str) -> list[tuple[int, str]]:
    """What sorts job 10 behind job 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", words) if part]
