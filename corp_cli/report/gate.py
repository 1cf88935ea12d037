"""Whether a result is good enough: within its limits, and no worse than a baseline. Pure: reads no files, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from corp_cli.config.gate import GateConfig, LimitsConfig
from corp_cli.errors import CorpError, GateError
from corp_cli.files.output import REPORT
from corp_cli.report.gate_input import LAYOUTS, Measured, measured

OK, WORSE, SKIPPED = "ok", "worse", "skipped"
ROUNDING = 1e-6  # files hold six significant digits
DIFFERENCES = {
    "architecture": ("are of different models", "compare reports of one model"),
    "weights": ("come from different dense weights", "prune the same weights"),
    "preparation": ("prepare images differently", "give both the same data.*"),
    "images": (
        "were judged on different images",
        "give both the same evaluation.path, evaluation.num_images and seed",
    ),
    "labels": ("have another number of labelled images", "give both the same labels"),
}
LABELS = "judge it on images with labels (evaluation.path, evaluation.labels)"
REFERENCE = "compare it with its dense model (corp evaluate model=… checkpoint=…)"
TIMING = "time it (evaluation.throughput_batches above 0)"
WHOLE = "give the whole file"
REMEDIES = {
    **dict.fromkeys(("top1", "top5"), LABELS),
    **dict.fromkeys(("agreement", "kl"), REFERENCE),
    **dict.fromkeys(("throughput", "speedup"), TIMING),
}


@dataclass(frozen=True)
class Unit:
    """How a figure is written: value and change, each with a number to fill in."""

    value: str
    change: str
    relative: bool = False  # whether changes and tolerances are fractions of the baseline's value


PERCENT = Unit("{:.2f}%", "{:+.2f} points")
NATS = Unit("{:.4f}", "{:+.4f} nats")
COUNT = Unit("{:,.0f}", "{:+.2%}", relative=True)
SPEED = Unit("{:,.0f}", "{:+.1%}", relative=True)
RATIO = Unit("{:.2f}x", "{:+.1%}", relative=True)


@dataclass(frozen=True)
class Metric:
    """A figure that may be worse than the baseline's by `gate.<key>`."""

    key: str
    figure: str
    label: str
    unit: Unit
    higher_is_better: bool
    timed: bool = False


METRICS = (
    Metric("top1_drop", "top1", "top-1", PERCENT, True),
    Metric("top5_drop", "top5", "top-5", PERCENT, True),
    Metric("agreement_drop", "agreement", "agreement", PERCENT, True),
    Metric("kl", "kl", "KL to dense", NATS, False),
    Metric("macs", "macs", "MACs", COUNT, False),
    Metric("params", "params", "parameters", COUNT, False),
    Metric("throughput", "throughput", "images/s", SPEED, True, timed=True),
    Metric("speedup", "speedup", "speedup", RATIO, True, timed=True),
)


@dataclass(frozen=True)
class Limit:
    """A figure, or with `of` what became of the dense model's, that `gate.<key>` holds above or below a value."""

    key: str
    figure: str
    label: str
    form: str
    of: str = ""  # drop: points below the dense model; removed: fraction of the dense model


LIMITS = (
    Limit("max_top1_drop", "top1", "top-1 below dense", "{:.2f} points", "drop"),
    Limit("max_top5_drop", "top5", "top-5 below dense", "{:.2f} points", "drop"),
    Limit("min_agreement", "agreement", "agreement", "{:.2f}%"),
    Limit("max_kl", "kl", "KL to dense", "{:.4f} nats"),
    Limit("min_macs_removed", "macs", "MACs removed", "{:.1%}", "removed"),
    Limit("min_params_removed", "params", "parameters removed", "{:.1%}", "removed"),
    Limit("min_speedup", "speedup", "speedup", "{:.2f}x"),
)


@dataclass(frozen=True)
class Row:
    """One comparison, as it is shown."""

    key: str
    metric: str
    baseline: str
    found: str
    change: str
    allowed: str
    verdict: str  # ok, worse or skipped
    note: str = ""  # why it was skipped


def require_comparable(report: Measured, baseline: Measured) -> None:
    """Raise CorpError where the figures of one file mean something else than those of the other."""
    if report.kind != baseline.kind:
        raise CorpError(
            f"{report.name} is of {LAYOUTS[report.kind].command} and {baseline.name} of "
            f"{LAYOUTS[baseline.kind].command}; give two files of the same command."
        )
    for what, (differ, remedy) in DIFFERENCES.items():
        ours, theirs = report.same[what], baseline.same[what]
        if ours != theirs:
            path = LAYOUTS[report.kind].same[what]
            raise CorpError(
                f"{report.name} and {baseline.name} {differ} ({path}: {in_short(ours, theirs)} and "
                f"{in_short(theirs, ours)}) and cannot be compared; {remedy}, or make a new baseline."
            )


def in_short(value: Any, other: Any) -> str:
    """`value` for a message: the start of a hash, and of a dictionary what differs from `other`."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{key} {value[key]}" for key in value if value[key] != other.get(key)) or "nothing"
    return f"{value}"[:32]


def compare(report: Measured, baseline: Measured, gate: GateConfig) -> Iterator[Row]:
    """A row for every tolerance that is set. Raises CorpError where the report lacks what the baseline has."""
    require_comparable(report, baseline)
    tolerances = gate.tolerances()
    for metric in METRICS:
        if metric.key in tolerances:
            yield compared(metric, tolerances[metric.key], report, baseline)


def compared(metric: Metric, tolerance: float, report: Measured, baseline: Measured) -> Row:
    """The row of one metric."""
    now, before = report.figures[metric.figure], baseline.figures[metric.figure]
    sign = -1 if metric.higher_is_better else 1
    key, unit = f"gate.{metric.key}", metric.unit
    was, found = ("-" if value is None else unit.value.format(value) for value in (before, now))
    allowed = unit.change.format(sign * tolerance + 0.0)  # no -0.00
    if metric.timed and report.machine != baseline.machine:
        return Row(key, metric.label, was, found, "", allowed, SKIPPED, "not compared: other machine")
    if now is None and before is not None:
        remedy = REMEDIES.get(metric.figure, WHOLE)
        raise CorpError(
            f"{report.name} has no {metric.label} and {baseline.name} has; {remedy}, or set {key}=null to leave it out."
        )
    if now is None or before is None:
        note = "not measured" if now is None else "not in the baseline"
        return Row(key, metric.label, was, found, "", allowed, SKIPPED, note)
    change = now - before
    if unit.relative:
        change = change / before if before else math.copysign(math.inf, change) if change else 0.0
    slack = ROUNDING * (1.0 if unit.relative else max(abs(now), abs(before)))
    verdict = WORSE if sign * change > tolerance + slack else OK
    return Row(key, metric.label, was, found, unit.change.format(change), allowed, verdict)


def hold(report: Measured, limits: LimitsConfig) -> Iterator[Row]:
    """A row for every limit that is set. Raises CorpError where the report lacks what a limit needs."""
    given = limits.limits()
    for limit in LIMITS:
        if limit.key not in given:
            continue
        value, bound = value_of(limit, report), given[limit.key]
        slack = ROUNDING * (100.0 if limit.of == "drop" else bound)
        if limit.key.startswith("max"):
            words, broken = "at most", value > bound + slack
        else:
            words, broken = "at least", value < bound - slack
        allowed = f"{words} {limit.form.format(bound)}"
        verdict = WORSE if broken else OK
        yield Row(f"gate.{limit.key}", limit.label, "", limit.form.format(value), "", allowed, verdict)


def value_of(limit: Limit, report: Measured) -> float:
    """The value that `limit` bounds."""
    value = report.figures[limit.figure]
    dense = report.figures[f"dense_{limit.figure}"] if limit.of else 0.0
    if value is None or dense is None:
        remedy = REFERENCE if value is not None else REMEDIES.get(limit.figure, WHOLE)
        raise CorpError(
            f"gate.{limit.key} cannot be checked, since {report.name} lacks what it needs; {remedy}, or set "
            f"gate.{limit.key}=null to leave it out."
        )
    if limit.of == "drop":
        return dense - value
    return 1 - value / dense if limit.of == "removed" else value


def require_passed(rows: list[Row], what: str, advice: str) -> None:
    """Raise GateError, with one sentence that names all that is worse, unless no row is."""
    worse = [row for row in rows if row.verdict == WORSE]
    if worse:
        found = "; ".join(f"{row.metric} {row.change or row.found}, allowed {row.allowed} ({row.key})" for row in worse)
        raise GateError(f"{what}: {found}; {advice}.")


def require_within(limits: LimitsConfig, content: dict[str, Any], folder: str) -> None:
    """Raise GateError where the `content` of report.json, which is in `folder`, breaks a limit."""
    if limits.limits():
        rows = list(hold(measured(content, REPORT), limits))
        require_passed(rows, "The result breaks a limit", f"its files are in {folder}")
