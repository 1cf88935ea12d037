"""What a multirun adds to its jobs: summary.csv, and a table when the last one is done. Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from corp_cli.cli.job import Job
from corp_cli.report.runs import SUMMARY, figures_of, shown, table, write_summary
from corp_cli.runtime import console

CACHE = ".shared"  # of the jobs, in the folder of the multirun while it lasts


@dataclass(frozen=True)
class Row:
    """One line of summary.csv: the job, and of its report what is None where it failed or was not measured."""

    job: int
    overrides: str
    status: str  # ok, failed, or worse than gate.* allows
    parameters: int | None = None
    macs: int | None = None
    top1: float | None = None  # of the pruned model, percent
    agreement: float | None = None  # percent
    kl: float | None = None
    images_per_second: float | None = None
    speedup: float | None = None
    folder: str | None = None  # of the job, within that of the multirun
    error: str | None = None


def row(job: Job, sweep_dir: Path) -> Row:
    """The line of `job`, from its report.json."""
    if job.failed:
        return Row(job.number, job.overrides, "failed", error=job.said)
    status = "worse" if job.error is not None else "ok"
    folder = os.path.relpath(job.output_dir, sweep_dir)
    line = Row(job.number, job.overrides, status, folder=folder, error=job.said)
    path = job.output_dir / "report.json"
    if not path.is_file():
        return line
    return replace(line, **figures_of(json.loads(path.read_text("utf-8")), str(path)))


def varied(rows: list[Row]) -> list[str]:
    """The overrides of every row without those that all rows share; all of them where there is but one row."""
    words = [line.overrides.split() for line in rows]
    common = set.intersection(*map(set, words)) if len(rows) > 1 else set()
    return [" ".join(word for word in line if word not in common) for line in words]


def conclude(jobs: list[Job], sweep_dir: Path) -> None:
    """Collect the reports of `jobs` in summary.csv and print the table; nothing where all of them failed."""
    rows = [row(job, sweep_dir) for job in jobs]
    if all(line.status == "failed" for line in rows):
        return
    write_summary([item.name for item in fields(Row)], map(asdict, rows), sweep_dir / SUMMARY)
    cells = [["failed"] if line.status == "failed" else shown(asdict(line)) for line in rows]
    texts = [[str(line.job), overrides] for line, overrides in zip(rows, varied(rows), strict=True)]
    out = console.out()
    out.print(table(["job", "overrides"], zip(texts, cells, strict=True)))
    out.print(f"Wrote {SUMMARY} to {sweep_dir}.", markup=False)
