"""`corp report`: runs of corp prune as one page, beside it a table and a picture. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from corp_cli.config.outcome import names_in
from corp_cli.config.report import ReportConfig
from corp_cli.errors import CorpError
from corp_cli.files.output import PAGE, REPORT, require_room, write_whole
from corp_cli.report import plots
from corp_cli.report.page import compared, facts, picture
from corp_cli.report.page.charts import measures
from corp_cli.report.page.page import page
from corp_cli.report.read import report_of
from corp_cli.report.runs import Run, ordered, readable_runs, words, write_runs
from corp_cli.report.schema import Report
from corp_cli.runtime import console

TABLE = "report.csv"


def run(cfg: ReportConfig, output_dir: Path) -> None:
    """Write report.html, report.csv and report.png of all runs at or below `cfg.runs`, and say what they show.

    Raises CorpError where there is none, or where a file cannot be written.
    """
    folders = [folder_of(Path(place)) for place in names_in(cfg.runs)]
    found = list(readable_reports(folders))
    if not found:
        where = ", ".join(map(str, folders))
        raise CorpError(f"There is no {REPORT} in or below {where} that can be read; give folders of corp prune.")
    keys, runs = ordered(run for run, _ in found)
    reports = [report for one in runs for run, report in found if run is one]
    folder = Path(cfg.output) if cfg.output else folders[0] if len(folders) == 1 else Path.cwd()
    require_room(folder, key="output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpError(f"output={folder} cannot be made ({error.strerror}); give another folder.") from error
    html = page(reports, keys, [words(one, keys) for one in runs])
    write_whole(folder / PAGE, lambda file: file.write(html), "output")
    write_runs(keys, runs, folder / TABLE, "output")
    written = [PAGE, TABLE]
    if plots.can_draw() and measures(reports):
        picture.write_picture(reports, folder / picture.PICTURE, "output")
        written.append(picture.PICTURE)
    out = console.out()
    several = len(reports) > 1
    out.print(f"{compared.sentence(reports) if several else facts.sentence(reports[0])}.", markup=False)
    out.print(f"Wrote {', '.join(written[:-1])} and {written[-1]} to {folder}.", markup=False)
    if not plots.can_draw():
        out.print(f"For {picture.PICTURE} too: pip install {plots.MISSING}", markup=False)


def folder_of(place: Path) -> Path:
    """The folder at `place`, or of the report.json at it."""
    if place.is_dir():
        return place
    if place.name == REPORT and place.is_file():
        return place.parent
    raise CorpError(f"{place} is neither a folder nor a {REPORT}; give one with runs of corp prune in it.")


def readable_reports(folders: list[Path]) -> list[tuple[Run, Report]]:
    """The runs at or below `folders`; a warning names every report that cannot be shown."""
    found = []
    for one in readable_runs(folders):
        try:
            found.append((one, report_of(one.content, str(Path(one.folder, REPORT)))))
        except CorpError as error:
            console.warn(f"left out: {error}")
    return found
