"""What a page says of several runs side by side: a sentence, four numbers, a table, and why they may not compare."""

from __future__ import annotations

from collections.abc import Sequence

from corp_cli.report.page.charts import Measure, front, measures, value
from corp_cli.report.page.facts import EMPTY, Cell, Number, gone, removed, seconds
from corp_cli.report.runs import amount
from corp_cli.report.schema import Report
from corp_cli.runtime.console import duration


def common_name(reports: Sequence[Report]) -> str:
    """The model, or how many there are."""
    names = {report.model.name for report in reports}
    return names.pop() if len(names) == 1 else f"{len(names)} models"


def nearest(reports: Sequence[Report], measure: Measure) -> int | None:
    """The run with the fewest MACs of those that are near their dense model."""
    near, sign = [], -1 if measure.lower else 1
    for i, report in enumerate(reports):
        got, dense = value(report, measure), value(report, measure, "dense")
        if got is not None and dense is not None and sign * (dense - got) <= measure.near:
            near.append((report.size.pruned.macs, -sign * got, i))
    return min(near)[2] if near else None


def best(reports: Sequence[Report]) -> int:
    """The run to show first: the nearest, else the best on the front."""
    known = measures(reports)
    near = nearest(reports, known[0]) if known else None
    return near if near is not None else front(reports, known[0])[-1] if known else 0


def sentence(reports: Sequence[Report]) -> str:
    """What they are, and how far one goes that stays near its dense model."""
    less = sorted(gone(report, "macs") for report in reports)
    span = f"{less[0]:.0f}% to {less[-1]:.0f}%" if less[-1] - less[0] >= 1 else f"{less[0]:.1f}%"
    found, known = f"{len(reports)} runs of {common_name(reports)} with {span} fewer MACs", measures(reports)
    near = nearest(reports, known[0]) if known else None
    if near is None:
        return found
    return f"{found}; {gone(reports[near], 'macs'):.0f}% fewer cost at most {within(known[0])} of {known[0].short}"


def within(measure: Measure) -> str:
    """What is near, in words."""
    return f"{measure.near:g} point" if measure.near == 1 else f"{measure.near:g}"


def numbers(reports: Sequence[Report], names: Sequence[str]) -> list[Number]:
    """The four that tell most."""
    times = sorted(map(seconds, reports))
    time = Number("Time of all runs", duration(sum(times)), f"{duration(times[0])} to {duration(times[-1])} each")
    if not (known := measures(reports)):
        return [Number("Runs", str(len(reports))), time]
    measure, ahead = known[0], front(reports, known[0])
    shown = [
        f"{measure.short} {measure.form.format(got)}" if (got := value(report, measure)) is not None else ""
        for report in reports
    ]
    less = [removed(report, "macs") for report in reports]
    near, last = nearest(reports, measure), ahead[-1]
    fewest = ("none", "") if near is None else (less[near], f"run {names[near]}, {shown[near]}")
    return [
        Number("Runs", str(len(reports)), f"{len(ahead)} on the front of {measure.short} against MACs"),
        Number(f"Fewest MACs within {within(measure)}", *fewest),
        Number(
            f"Best {measure.short}", shown[last].removeprefix(measure.short), f"run {names[last]}, {less[last]} MACs"
        ),
        time,
    ]


def doubts(reports: Sequence[Report]) -> list[str]:
    """Why their figures may not compare."""
    found = []
    if len({report.evaluation.list_sha256 for report in reports}) > 1:
        found.append("The runs were judged on different images: their accuracy and fidelity do not compare.")
    if len({report.model.dense_sha256 for report in reports}) > 1:
        found.append("The runs began from different dense weights: fidelity is to another model in each.")
    machines = {(report.environment.device_name, report.environment.torch_threads) for report in reports}
    if len(machines) > 1:
        found.append("The runs were made on different machines or threads: their times do not compare.")
    return found


def run_table(
    reports: Sequence[Report], keys: Sequence[str], words: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[Cell]], int]:
    """(headings, rows, how many columns hold words): of every run its name, its settings, and what some run has."""
    known, names = measures(reports), [name for *_, name in words]
    keys, settings = told_apart(keys, words)
    ahead, timed = front(reports, known[0]) if known else [], any(report.throughput for report in reports)
    headings = ["run", *keys, "front", "MACs", "MACs removed", "parameters", *(measure.short for measure in known)]
    headings += [*(["images/s", "speed-up"] if timed else []), "time"]
    rows = []
    for i, report in enumerate(reports):
        size, speed = report.size.pruned, report.throughput
        row = [Cell(names[i]), *map(sortable, settings[i]), Cell("●" if i in ahead else "", -float(i in ahead))]
        row.append(Cell(amount(size.macs), size.macs))
        row.append(Cell(removed(report, "macs"), gone(report, "macs")))
        row.append(Cell(amount(size.parameters), size.parameters))
        for measure in known:
            got = value(report, measure)
            row.append(EMPTY if got is None else Cell(measure.form.format(got), got))
        if speed:
            fast = speed.images_per_second.get("pruned", 0.0)
            row += [Cell(f"{fast:.0f}", fast), Cell(f"×{speed.speedup:.2f}", speed.speedup)]
        elif timed:
            row += [EMPTY, EMPTY]
        rows.append([*row, Cell(duration(seconds(report)), seconds(report))])
    return headings, rows, len(keys) + 2


def told_apart(keys: Sequence[str], words: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns without those that tell the same runs apart as one before them does, the recipe first."""
    columns = {key: [row[i] for row in words] for i, key in enumerate(keys)}
    found: dict[tuple[int, ...], str] = {}
    for key in sorted(columns, key=lambda key: key != "recipe"):
        found.setdefault(tuple(columns[key].index(word) for word in columns[key]), key)
    kept = [key for key in columns if key in found.values()]
    return kept, [[columns[key][i] for key in kept] for i in range(len(words))]


def sortable(text: str) -> Cell:
    """A setting; a number is sorted as one."""
    try:
        return Cell(text, float(text))
    except ValueError:
        return Cell(text)
