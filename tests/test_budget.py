"""Budgets: the knapsack against brute force, costs against counting, curves and plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_cli.budget import Choice, cost_of, make_budget, matching_uniform, solve, spend, unit_costs
from corp_cli.config import CalibrationConfig, CompensationConfig, EvaluationConfig, PruneConfig, SparsityConfig
from corp_cli.curves import interpolate
from corp_cli.errors import CorpError
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Sizes
from corp_cli.models.loading import ModelSpec, skeleton
from corp_cli.pipeline import prune
from corp_cli.plan import SizePlan, read_plan, write_plan
from tests.variants import SMALL

SPEC = ModelSpec("deit_tiny_patch16_224", SMALL, {"input_size": [3, 32, 32]})
BLOCKS = blocks_of(skeleton(SPEC))
DENSE = tuple(block.sizes for block in BLOCKS)


@settings(deadline=None, max_examples=25)
@given(
    tables=st.lists(
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50)), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    share=st.floats(0, 1),
)
def test_the_knapsack_finds_what_brute_force_finds(tables: list[list[tuple[int, int]]], share: float) -> None:
    choices = [
        Choice(i, "mlp", tuple(range(len(t))), tuple(float(d) for _, d in t), tuple(float(c) for c, _ in t))
        for i, t in enumerate(tables)
    ]
    least, most = (sum(f(c.cost) for c in choices) for f in (min, max))
    budget = least + share * (most - least) + 1e-6
    taken, predicted = solve(choices, budget)
    assert sum(c.cost[i] for c, i in zip(choices, taken, strict=True)) <= budget + 1e-6
    feasible = (
        sum(c.damage[i] for c, i in zip(choices, combination, strict=True))
        for combination in itertools.product(*(range(len(c.sizes)) for c in choices))
        if sum(c.cost[i] for c, i in zip(choices, combination, strict=True)) <= budget
    )
    assert predicted == pytest.approx(min(feasible), abs=1e-2)


def test_a_budget_out_of_reach_is_refused() -> None:
    with pytest.raises(CorpError, match="budget cannot be met"):
        solve([Choice(0, "mlp", (8, 16), (1.0, 0.0), (8.0, 16.0))], 7.0)


@pytest.mark.parametrize("kind", ["macs", "params"])
def test_costs_are_linear_in_every_size(kind: str) -> None:
    unit = unit_costs(SPEC, BLOCKS, DENSE, kind)
    sizes = (Sizes(40, 5, 9, 2), Sizes(17, 16, 2, 2))
    spent = sum(cost * (getattr(DENSE[i], group) - getattr(sizes[i], group)) for (i, group), cost in unit.items())
    assert cost_of(SPEC, BLOCKS, DENSE, kind) - cost_of(SPEC, BLOCKS, sizes, kind) == pytest.approx(spent)


@pytest.mark.parametrize("key", ["macs", "params"])
@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_what_is_spent_stays_within_the_budget(key: str, fraction: float) -> None:
    cfg = SparsityConfig(macs=fraction, round_to=2) if key == "macs" else SparsityConfig(params=fraction, round_to=2)
    budget = make_budget(SPEC, BLOCKS, cfg, DENSE)
    allowed = (1 - fraction) * cost_of(SPEC, BLOCKS, DENSE, key)
    damage = {(i, group): torch.linspace(1, 0, getattr(DENSE[i], group) + 1) ** 2 * (1 + i) for i, group in budget.unit}
    sizes, _ = spend(budget, damage)
    assert allowed * 0.9 < cost_of(SPEC, BLOCKS, sizes, key) <= allowed
    context = cost_of(SPEC, BLOCKS, matching_uniform(budget), key)
    assert context <= allowed


def test_damage_is_interpolated_along_the_error_and_never_falls() -> None:
    errors = torch.tensor([16.0, 9.0, 4.0, 1.0, 0.0])  # by kept size 0..4
    curve = interpolate(errors, [4, 2], [0.1, 0.5])
    torch.testing.assert_close(curve, torch.tensor([1.6, 0.9, 0.4, 0.1, 0.0]).double())
    flat = interpolate(errors, [4, 3, 2], [0.1, 0.5, 0.3])
    assert (flat[:-1] >= flat[1:]).all()
    assert flat[2] == flat[3]


def test_plans_come_back(tmp_path: Path) -> None:
    sizes = (Sizes(40, 5, 9, 2), Sizes(128, 16, 16, 1))
    write_plan(SizePlan(sizes, 0.25), BLOCKS, tmp_path)
    assert read_plan(tmp_path / "plan.yaml", BLOCKS).sizes == sizes
    (tmp_path / "part.yaml").write_text("blocks: {blocks.1: {mlp: 8}}")
    assert read_plan(tmp_path / "part.yaml", BLOCKS).sizes == (DENSE[0], Sizes(8, 16, 16, 2))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no `blocks`"),
        ("blocks: [1]", "holds no `blocks`"),
        ("{", "cannot be read"),
        ("blocks: {blocks.7: {mlp: 8}}", "names blocks.7, which the model does not have"),
        ("blocks: {blocks.0: {mpl: 8}}", r"names blocks\.0\.mpl"),
        ("blocks: {blocks.0: {mlp: 0}}", "give a number from 1 to 128"),
        ("blocks: {blocks.0: {mlp: 129}}", "give a number from 1 to 128"),
        ("blocks: {blocks.0: {mlp: 8.5}}", "give a number from 1 to 128"),
    ],
)
def test_broken_plans_are_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(CorpError, match=sentence):
        read_plan(path, BLOCKS)


def run(sparsity: SparsityConfig, folder: Path | None = None) -> PruneConfig:
    return PruneConfig(
        sparsity=sparsity,
        calibration=CalibrationConfig(num_images=128),
        evaluation=EvaluationConfig(num_images=64, throughput_batches=0),
        device="cpu",
    )


def test_a_budget_is_met_and_its_plan_can_be_given_back(tmp_path: Path) -> None:
    first = prune(run(SparsityConfig(macs=0.4, curve_images=32)), tmp_path).report
    assert 39 < first.size["removed_percent"]["macs"] < 45
    assert first.size["removed_percent"]["macs"] >= 40
    assert first.sparsity["predicted_kl"] > 0
    again = prune(run(SparsityConfig(plan=str(tmp_path / "plan.yaml")))).report
    assert [block["pruned"] for block in again.blocks] == [block["pruned"] for block in first.blocks]
    assert again.evaluation["pruned"]["kl"] == first.evaluation["pruned"]["kl"]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"macs": 0.4, "joint": 0.5}, "sparsity.macs chooses the sizes that sparsity.joint fixes"),
        ({"macs": 0.4, "params": 0.5}, "both choose the sizes"),
        ({"plan": "p.yaml", "mlp": 0.5}, "sparsity.plan chooses"),
        ({"macs": 1.0}, "out of range"),
        ({"macs": 0.4, "rounds": 0}, r"sparsity\.rounds=0"),
    ],
)
def test_contradictions_are_refused(kwargs: dict[str, float], sentence: str) -> None:
    with pytest.raises(CorpError, match=sentence):
        SparsityConfig(**kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["macs", "params"])
def test_a_budget_out_of_reach_is_told_before_any_long_work(key: str) -> None:
    asked: dict[str, Any] = {key: 0.97}
    with pytest.raises(CorpError, match=rf"sparsity\.{key}=0\.97 cannot be met: at most 0\.\d+ of this model"):
        prune(run(SparsityConfig(**asked)))


def test_a_missing_plan_is_told_before_any_long_work(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match=r"sparsity\.plan=.*nowhere\.yaml does not exist"):
        prune(run(SparsityConfig(plan=str(tmp_path / "nowhere.yaml"))))


def test_a_bad_image_among_those_for_curves_is_left_out(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(40):
        Image.new("L", (8, 8), 6 * i).save(tmp_path / f"{i:02}.png")
    (tmp_path / "07.png").write_bytes(b"not an image")
    cfg = run(SparsityConfig(macs=0.3, curve_images=40))
    calibration = CalibrationConfig(path=str(tmp_path), num_images=40, max_bad=0.1, num_workers=0)
    evaluation = replace(cfg.evaluation, max_bad=0.1)  # no image is left over, so the same ones are judged on
    report = prune(replace(cfg, calibration=calibration, evaluation=evaluation)).report
    assert report.calibration["bad"]["count"] == 1
    assert len([w for w in report.warnings if "of calibration.path" in w]) == 1


@pytest.mark.parametrize("key", ["alpha", "beta", "token_floor"])
def test_shares_are_fractions(key: str) -> None:
    asked: dict[str, Any] = {key: -0.5}
    with pytest.raises(CorpError, match=rf"compensation\.{key}=-0\.5 is out of range"):
        CompensationConfig(**asked)
