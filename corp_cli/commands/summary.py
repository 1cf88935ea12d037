"""`corp summary`: all runs of corp prune below a folder side by side, however they were started. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from corp_cli.config.summary import SummaryConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import REPORT
from corp_cli.report.runs import SUMMARY, ordered, readable_runs, shown, table, words, write_runs
from corp_cli.runtime import console


def run(cfg: SummaryConfig, output_dir: Path) -> None:
    """Print the table of all runs below `cfg.folder`, and write it there as summary.csv.

    Raises CorpError where there is none, or where the file cannot be written.
    """
    folder = Path(str(cfg.folder))
    if not folder.is_dir():
        raise CorpError(f"folder={folder} is not a folder; give one with runs of corp prune below it.")
    keys, runs = ordered(readable_runs([folder]))
    if not runs:
        raise CorpError(f"There is no {REPORT} below {folder} that can be read; give a folder with runs of corp prune.")
    out = console.out()
    if not out.is_terminal:
        out.width = 160  # a log has no width
    out.print(table([*keys, "folder"], ((words(one, keys), shown(one.figures)) for one in runs)))
    write_runs(keys, runs, folder / SUMMARY)
    out.print(f"Wrote {SUMMARY} to {folder}, of {len(runs)} run{'s' if len(runs) > 1 else ''}.", markup=False)
