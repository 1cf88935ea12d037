"""`corp check`: a report against a baseline and its limits, as a table, JUnit XML and Markdown. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.markup import escape
from rich.table import Table

from corp_cli.config.gate import CheckConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import write_whole
from corp_cli.report.gate import SKIPPED, WORSE, Row, compare, hold, require_passed
from corp_cli.report.gate_input import Measured, measured
from corp_cli.runtime import console

HEADINGS = ("metric", "baseline", "report", "change", "allowed", "result")
WORDS = ("metric", "result")  # the columns that hold no figures


def run(cfg: CheckConfig, output_dir: Path) -> None:
    """Show what the check found, and write the files that `cfg` names.

    Raises GateError where the report is worse, CorpError if none can tell.
    """
    assert cfg.report is not None  # CheckConfig asks for one
    report = read(cfg.report, "report")
    rows = [] if cfg.against is None else list(compare(report, read(cfg.against, "against"), cfg.gate))
    rows += hold(report, cfg.gate)
    title = f"{cfg.report} against {cfg.against}" if cfg.against else f"{cfg.report} and its limits"
    if cfg.junit is not None:
        write(cfg.junit, junit(rows, title), "junit")
    if cfg.markdown is not None:
        write(cfg.markdown, markdown(rows, title), "markdown")
    out = console.out()
    if not out.is_terminal:
        out.width = 160  # the log of a CI job has no width
    out.print(table(rows, title))
    out.print(f"{in_total(rows).capitalize()}.", markup=False)
    if all(row.verdict == SKIPPED for row in rows):
        why = "; ".join(f"{row.metric}: {row.note}" for row in rows)
        raise CorpError(f"Nothing could be compared ({why}); give gate.* something that both files hold.")
    what = f"{cfg.report} is worse than {cfg.against}" if cfg.against else f"{cfg.report} breaks a limit"
    require_passed(rows, what, f"if that is meant, {'make a new baseline or ' if cfg.against else ''}allow more")


def read(path: str, key: str) -> Measured:
    """What the file `path` says. Raises CorpError, naming `key`, where it cannot be read or is no report."""
    try:
        content: Any = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise CorpError(
            f"{key}={path} cannot be read ({error.strerror}); give a report.json of corp prune or an evaluation.json "
            "of corp evaluate."
        ) from error
    except (ValueError, RecursionError) as error:  # JSON and UTF-8
        raise CorpError(f"{key}={path} is not whole JSON ({error}); write it again with corp prune.") from error
    return measured(content, path)


def columns(rows: list[Row]) -> dict[str, list[str]]:
    """heading → its cells, without the columns that limits alone leave empty."""
    lines = [(row.metric, row.baseline, row.found, row.change, row.allowed, row.note or row.verdict) for row in rows]
    return {heading: list(cells) for heading, *cells in zip(HEADINGS, *lines, strict=True) if any(cells)}


def in_total(rows: list[Row]) -> str:
    """How many rows came out how."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in (WORSE, SKIPPED)}
    compared = len(rows) - counts[SKIPPED]
    left_out = f", {counts[SKIPPED]} not compared" if counts[SKIPPED] else ""
    return f"{counts[WORSE] or 'none'} of {compared} worse than allowed{left_out}"


def table(rows: list[Row], title: str) -> Table:
    """The comparison for the terminal."""
    found, shown = Table(title=escape(title), title_justify="left"), columns(rows)
    for heading in shown:
        found.add_column(heading, justify="left" if heading in WORDS else "right")
    for row, *cells in zip(rows, *shown.values(), strict=True):
        found.add_row(*cells, style="red" if row.verdict == WORSE else None)
    return found


def markdown(rows: list[Row], title: str) -> str:
    """The comparison as a GitHub table below a heading."""
    shown = columns(rows)
    lines = [list(shown), ["---" if heading in WORDS else "---:" for heading in shown]]
    for row, *cells in zip(rows, *shown.values(), strict=True):
        lines.append([f"**{cell}**" if row.verdict == WORSE and cell else cell for cell in cells])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### corp check: {in_total(rows)}\n\n`{title}`\n\n{body}\n"


def junit(rows: list[Row], title: str) -> str:
    """The comparison as JUnit XML: a test case for every key of `gate`."""
    counts = {verdict: str(sum(row.verdict == verdict for row in rows)) for verdict in (WORSE, SKIPPED)}
    totals = {"tests": str(len(rows)), "failures": counts[WORSE], "errors": "0", "skipped": counts[SKIPPED]}
    suites = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": f"corp check: {title}", **totals})
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "corp.check", "name": row.key})
        if row.verdict == WORSE:
            said = f"{row.metric} {row.change or row.found}, allowed {row.allowed}"
            found = f"baseline {row.baseline}, report {row.found}" if row.baseline else f"report {row.found}"
            ElementTree.SubElement(case, "failure", {"message": said, "type": "worse"}).text = found
        elif row.verdict == SKIPPED:
            ElementTree.SubElement(case, "skipped", {"message": row.note})
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "utf-8", xml_declaration=True).decode() + "\n"


def write(path: str, text: str, key: str) -> None:
    """Write `text` to the file `path`, whole or not at all. Raises CorpError, naming `key`, if that fails."""
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), lambda file: file.write(text))
    except (OSError, CorpError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        why = cause.strerror if isinstance(cause, OSError) else str(cause)
        raise CorpError(f"{key}={path} cannot be written ({why}); give another file.") from error
