"""The gate: which changes are worse than allowed, which files can be compared, and what limits say."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corp_cli import load_config
from corp_cli.config.gate import CheckConfig, GateConfig, LimitsConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError, GateError
from corp_cli.prepare.work import require_labels
from corp_cli.report.gate import LIMITS, METRICS, OK, SKIPPED, WORSE, compare, hold, require_within
from corp_cli.report.gate_input import measured
from tests.support.golden import DEFAULT, EVALUATION, MACHINE, REPORT, changed

EVERYTHING = replace(DEFAULT, throughput=0.1, speedup=0.1)
# field of the report, its value in the baseline, key of the gate, the worst value that is still allowed
STEPS = [
    ("evaluation__pruned__top1", 97.75, "top1_drop", 97.25),
    ("evaluation__pruned__top5", 99.5, "top5_drop", 99.0),
    ("evaluation__pruned__agreement", 99.5, "agreement_drop", 98.5),
    ("evaluation__pruned__kl", 0.002, "kl", 0.012),
    ("size__pruned__macs", 6000000, "macs", 6060000),
    ("size__pruned__parameters", 402000, "params", 406020),
    ("throughput__images_per_second__pruned", 3500.0, "throughput", 3150.0),
]


def verdicts(content: dict[str, Any], gate: GateConfig = EVERYTHING) -> dict[str, str]:
    rows = compare(measured(content, "report.json"), measured(REPORT, "baseline.json"), gate)
    return {row.key.removeprefix("gate."): row.verdict for row in rows}


def refusal(content: Any, baseline: Any = REPORT, gate: GateConfig = EVERYTHING) -> str:
    with pytest.raises(CorpError) as caught:
        list(compare(measured(content, "new.json"), measured(baseline, "old.json"), gate))
    return str(caught.value)


# Against a baseline


def test_a_report_is_as_good_as_itself() -> None:
    strictest = GateConfig(**{metric.key: 0.0 for metric in METRICS})
    assert set(verdicts(REPORT, strictest).values()) == {OK}


@pytest.mark.parametrize(("path", "value", "key", "allowed"), STEPS, ids=[step[2] for step in STEPS])
def test_what_is_allowed_passes_and_a_little_more_does_not(path: str, value: float, key: str, allowed: float) -> None:
    beyond = allowed + 0.02 * (allowed - value)
    better = value - (allowed - value) / 4
    assert verdicts(changed(REPORT, **{path: allowed}))[key] == OK
    assert verdicts(changed(REPORT, **{path: better}))[key] == OK
    found = verdicts(changed(REPORT, **{path: beyond}))
    assert found[key] == WORSE
    assert {name for name, verdict in found.items() if verdict == WORSE} <= {key, "speedup"}


def test_every_tolerance_and_limit_of_the_config_is_a_metric() -> None:
    limits = [item.name for item in fields(LimitsConfig)]
    assert [limit.key for limit in LIMITS] == limits
    assert [metric.key for metric in METRICS] == [f.name for f in fields(GateConfig) if f.name not in limits]


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_a_drop_counts_in_points(before: float, now: float, tolerance: float) -> None:
    gate = GateConfig(top1_drop=tolerance)
    old, new = (measured(changed(REPORT, evaluation__pruned__top1=value), "r") for value in (before, now))
    (row,) = compare(new, old, gate)
    if abs(before - now - tolerance) > 1e-3:
        assert (row.verdict == WORSE) == (before - now > tolerance)


def test_null_switches_a_metric_off() -> None:
    worse = changed(REPORT, evaluation__pruned__top1=50.0)
    found = verdicts(worse, replace(EVERYTHING, top1_drop=None))
    assert "top1_drop" not in found
    assert set(found.values()) == {OK}


def test_times_of_another_machine_are_not_compared() -> None:
    other = changed(REPORT, environment={**MACHINE, "device": "cuda:0"}, throughput__images_per_second__pruned=1.0)
    found = verdicts(other)
    assert (found["throughput"], found["speedup"], found["top1_drop"]) == (SKIPPED, SKIPPED, OK)


def test_what_neither_measured_is_skipped_and_what_only_the_report_measured_too() -> None:
    unlabelled = {"evaluation__labelled_images": 0, "evaluation__pruned__top1": None}
    without = measured(changed(REPORT, **unlabelled), "old.json")
    rows = {row.key: row for row in compare(without, without, EVERYTHING)}
    assert (rows["gate.top1_drop"].verdict, rows["gate.top1_drop"].note) == (SKIPPED, "not measured")
    old = measured(changed(REPORT, evaluation__pruned__top5=None), "old.json")
    rows = {row.key: row for row in compare(measured(REPORT, "new.json"), old, EVERYTHING)}
    assert (rows["gate.top5_drop"].verdict, rows["gate.top5_drop"].note) == (SKIPPED, "not in the baseline")


def test_what_the_report_lost_cannot_be_compared() -> None:
    assert refusal(changed(REPORT, evaluation__pruned__top1=None)) == (
        "new.json has no top-1 and old.json has; judge it on images with labels (evaluation.path, evaluation.labels), "
        "or set gate.top1_drop=null to leave it out."
    )
    assert "evaluation.throughput_batches" in refusal(changed(REPORT, throughput=None))
    assert verdicts(changed(REPORT, throughput=None), DEFAULT)["top1_drop"] == OK


def test_a_field_that_an_older_baseline_lacks_is_not_measured() -> None:
    old = changed(REPORT)
    del old["evaluation"]["pruned"]["top5"]
    rows = list(compare(measured(REPORT, "new.json"), measured(old, "old.json"), EVERYTHING))
    assert {row.verdict for row in rows if row.key == "gate.top5_drop"} == {SKIPPED}


def test_evaluations_are_compared_as_reports_are() -> None:
    worse = changed(EVALUATION, results__model={**REPORT["evaluation"]["pruned"], "top1": 90.0})  # type: ignore[index]
    rows = list(compare(measured(worse, "new.json"), measured(EVALUATION, "old.json"), EVERYTHING))
    assert [row.key for row in rows if row.verdict == WORSE] == ["gate.top1_drop"]
    dense = changed(EVALUATION, model__dense_sha256=None, reference=None, results__reference=None)
    assert {row.verdict for row in compare(measured(dense, "a"), measured(dense, "b"), EVERYTHING)} == {OK, SKIPPED}
    assert refusal(EVALUATION) == (
        "new.json is of corp evaluate and old.json of corp prune; give two files of the same command."
    )


# What cannot be compared


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model__timm_name", "vit_base", ["are of different models", "vit_base and vit_tiny"]),
        ("model__dense_sha256", "c" * 64, ["different dense weights", "make a new baseline"]),
        ("evaluation__list_sha256", "c" * 64, ["different images", "evaluation.path"]),
        ("evaluation__labelled_images", 380, ["labelled_images: 380 and 400"]),
        ("model__data", {"crop_pct": 0.9}, ["prepare images differently", "crop_pct 0.9 and "]),
    ],
)
def test_files_that_mean_something_else(path: str, value: Any, words: list[str]) -> None:
    said = refusal(changed(REPORT, **{path: value}))
    assert said.startswith("new.json and old.json ")
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (changed(REPORT, schema_version=2), ["schema_version 2", "compares 1", "write it again"]),
        ({}, ["is not a report"]),
        ([], ["is not a report"]),
        ("report", ["is not a report"]),
        ({"schema_version": 1, "settings": []}, ["is not a report"]),
        (changed(REPORT, evaluation={}), ["lacks evaluation.list_sha256"]),
        (changed(REPORT, evaluation__pruned__top1="high"), ["top1=high", "not a number"]),
        (changed(REPORT, evaluation__pruned__kl=float("nan")), ["kl=nan", "not a number"]),
        (changed(REPORT, size__pruned__macs=True), ["macs=True", "not a number"]),
        (changed(REPORT, size__pruned__macs=10**400), ["is not a number"]),
    ],
)
def test_what_is_no_report_of_this_version(content: Any, words: list[str]) -> None:
    for said in (refusal(content), refusal(REPORT, content).replace("old.json", "new.json")):
        assert said.startswith("new.json ")
        for word in words:
            assert word in said


# Limits


@pytest.mark.parametrize(
    ("key", "passes", "breaks"),
    [
        ("max_top1_drop", 0.5, 0.49),
        ("max_top5_drop", 0.5, 0.0),
        ("min_agreement", 99.5, 99.6),
        ("max_kl", 0.002, 0.0019),
        ("min_macs_removed", 0.4, 0.41),
        ("min_params_removed", 0.4, 0.41),
        ("min_speedup", 1.4, 1.41),
    ],
)
def test_limits(key: str, passes: float, breaks: float) -> None:
    for content in (REPORT, changed(EVALUATION, throughput={"images_per_second": {"model": 7, "reference": 5}})):
        for value, expected in ((passes, OK), (breaks, WORSE)):
            (row,) = hold(measured(content, "report.json"), LimitsConfig(**{key: value}))
            assert (row.key, row.verdict) == (f"gate.{key}", expected)


@pytest.mark.parametrize(
    ("content", "key", "remedy"),
    [
        (changed(REPORT, evaluation__pruned__top1=None), "max_top1_drop", "labels"),
        (changed(REPORT, throughput=None), "min_speedup", "evaluation.throughput_batches"),
        (changed(EVALUATION, reference=None), "min_macs_removed", "corp evaluate model="),
        (changed(EVALUATION, results__reference=None), "max_top1_drop", "corp evaluate model="),
    ],
)
def test_a_limit_that_cannot_be_checked(content: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(CorpError, match=rf"^gate\.{key} cannot be checked.*{remedy}.*gate\.{key}=null"):
        list(hold(measured(content, "report.json"), LimitsConfig(**{key: 1.0})))


def test_broken_limits_of_a_run_are_one_sentence() -> None:
    require_within(LimitsConfig(max_top1_drop=0.5, max_kl=0.1), REPORT, "out")
    require_within(LimitsConfig(), {}, "out")
    with pytest.raises(GateError) as caught:
        require_within(LimitsConfig(max_top1_drop=0.25, max_kl=0.001, min_agreement=99), REPORT, "out")
    assert str(caught.value) == (
        "The result breaks a limit: top-1 below dense 0.50 points, allowed at most 0.25 points (gate.max_top1_drop); "
        "KL to dense 0.0020 nats, allowed at most 0.0010 nats (gate.max_kl); its files are in out."
    )


def test_a_limit_that_needs_labels_is_refused_without_them() -> None:
    require_labels(LimitsConfig(max_top1_drop=1.0), labelled=True)
    require_labels(LimitsConfig(max_kl=1.0), labelled=False)
    with pytest.raises(CorpError, match=r"^gate\.max_top1_drop needs labels"):
        require_labels(LimitsConfig(max_top1_drop=1.0), labelled=False)


# Configs


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gate.max_kl=-1", "gate.max_kl=-1.0 is out of range; it must be at least 0."),
        ("gate.max_top1_drop=nan", "gate.max_top1_drop=nan is out of range; it must be at least 0."),
        ("gate.min_agreement=101", "gate.min_agreement=101 is out of range; it must be at most 100."),
        ("gate.min_macs_removed=40", "gate.min_macs_removed=40 is out of range; it must be a fraction from 0 to 1."),
        ("gate.top1_drop=1", "corp prune has no key gate.top1_drop; did you mean gate.max_top1_drop?"),
        (
            "gate=strict",
            "gate=strict is for corp check, which compares with a baseline; give corp prune limits such as "
            "gate.max_top1_drop=2.",
        ),
    ],
)
def test_limits_out_of_range(override: str, message: str) -> None:
    with pytest.raises(CorpError) as caught:
        load_config(override)
    assert str(caught.value) == message


def test_a_limit_of_speed_needs_a_timing() -> None:
    with pytest.raises(CorpError, match=r"evaluation\.throughput_batches=0"):
        load_config("gate.min_speedup=1", "evaluation.throughput_batches=0")
    assert load_config("gate.min_speedup=1").gate == LimitsConfig(min_speedup=1.0)
    assert PruneConfig().gate.limits() == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Say which report"),
        ({"report": "r"}, "nothing to check; give a baseline"),
        ({"report": "r", "against": "b", "gate": GateConfig()}, "all of gate"),
    ],
)
def test_a_check_of_nothing(given: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpError, match=message):
        CheckConfig(**given)
