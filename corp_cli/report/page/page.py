"""report.html: the page of one run, or of several side by side. One file: its charts and their library are in it."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from corp_cli.files.output import PAGE, write_whole
from corp_cli.report.page import compared, facts
from corp_cli.report.page.charts import details, front, measures, trade
from corp_cli.report.runs import flat, text
from corp_cli.report.schema import Report
from corp_cli.runtime.console import readable
from corp_cli.version import __version__

HERE = Path(__file__).parent
DETAILED = 24  # of many runs, how many a page shows block by block: those on the front first


def write_page(report: Report, folder: Path) -> None:
    """Write the page of one run into `folder`, whole or not at all. Raises CorpError if it cannot be written."""
    html = page([report])
    write_whole(folder / PAGE, lambda file: file.write(html))


def page(reports: Sequence[Report], keys: Sequence[str] = (), words: Sequence[Sequence[str]] = (("",),)) -> str:
    """HTML of the page; of every run, `words` are its settings for `keys`, in which the runs differ, and its name.

    What comes from reports is escaped, and no script runs but the two of this folder.
    """
    names = [name for *_, name in words]
    several, known = len(reports) > 1, measures(reports)
    ahead = front(reports, known[0]) if known else []
    first = sorted(sorted(range(len(reports)), key=lambda i: i not in ahead)[:DETAILED])
    library, own = ((HERE / file).read_text("utf-8") for file in ("chartjs/chart.umd.min.js", "page.js"))
    scripts = [library.partition("\n//# sourceMappingURL")[0], own.strip()]
    found = template().render(
        version=__version__,
        css=(HERE / "page.css").read_text("utf-8"),
        licence=(HERE / "chartjs/LICENSE.md").read_text("utf-8"),
        scripts=scripts,
        hashes=" ".join(map(source_hash, scripts)),
        facts=facts,
        several=several,
        sentence=compared.sentence(reports) if several else facts.sentence(reports[0]),
        numbers=compared.numbers(reports, names) if several else facts.numbers(reports[0]),
        doubts=compared.doubts(reports),
        runs=compared.run_table(reports, keys, words) if several else None,
        names=names,
        shown=compared.best(reports),
        detailed=[(i, names[i], reports[i]) for i in first],
        settings={i: settings(reports[i]) for i in first},
        measures=[measure.label for measure in known],
        data={
            "names": names,
            "trades": [trade(reports, measure) for measure in known],
            "details": {str(i): details(reports[i]) for i in first},
        },
    )
    return readable(found).lstrip()


@functools.cache
def template() -> Template:
    """page.html, which escapes whatever it is given that is not marked as safe."""
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=FileSystemLoader(HERE), **options).get_template("page.html")


def source_hash(script: str) -> str:
    """What lets a browser run `script`, and no other, by Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def settings(report: Report) -> str:
    """The config of a run, a key a line, as it is typed."""
    found = dict(flat(report.config))
    return "\n".join(f"{key}={text(found, key)}" for key in found)
