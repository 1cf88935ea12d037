"""What a multirun adds to its jobs: summary.csv, and a table when the last one is done. Imports no torch."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from corp_cli.cli.job import Job
from corp_cli.files.output import write_whole
from corp_cli.runtime import console

SUMMARY = "summary.csv"
FIGURES = {  # of the table: heading → the field of Row, and how it is shown
    "parameters": ("parameters", "{:,}"),
    "MACs": ("macs", "{:,}"),
    "top-1": ("top1", "{:.1f}%"),
    "KL": ("kl", "{:.3g}"),
    "images/s": ("images_per_second", "{:.0f}"),
}
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
    report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    pruned, speed = report["size"]["pruned"] | report["evaluation"]["pruned"], report["throughput"]
    figures = {name: pruned[name] for name in ("parameters", "macs", "top1", "agreement", "kl")}
    if speed:
        figures |= {"images_per_second": speed["images_per_second"]["pruned"], "speedup": speed["speedup"]}
    return replace(line, **figures)


def write_summary(rows: list[Row], folder: Path) -> None:
    """Write summary.csv into the folder of the multirun."""

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, [item.name for item in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in rows)

    write_whole(folder / SUMMARY, write)


def table(rows: list[Row]) -> Table:
    """The figures to compare jobs by."""
    found = Table()
    for column in ("job", "overrides", *FIGURES):
        found.add_column(column, justify="left" if column == "overrides" else "right", overflow="fold")
    for line in rows:
        cells = ["failed"]
        if line.status != "failed":
            figures = [(getattr(line, name), form) for name, form in FIGURES.values()]
            cells = ["-" if figure is None else form.format(figure) for figure, form in figures]
        found.add_row(str(line.job), line.overrides, *cells)
    return found


def conclude(jobs: list[Job], sweep_dir: Path) -> None:
    """Collect the reports of `jobs` in summary.csv and print the table; nothing where all of them failed."""
    rows = [row(job, sweep_dir) for job in jobs]
    if all(line.status == "failed" for line in rows):
        return
    write_summary(rows, sweep_dir)
    out = console.out()
    out.print(table(rows))
    out.print(f"Wrote {SUMMARY} to {sweep_dir}.", markup=False)
