"""Budgets: the knapsack against brute force, costs against counting, curves and plans."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_cli.config.prune import CompensationConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.models.blocks import TOKENS, Sizes
from corp_cli.models.token_block import all_tokens, most_merged
from corp_cli.pipeline import prune
from corp_cli.sizes.budget import (
    Choice,
    make_budget,
    matching_fraction,
    no_stdout,
    solve,
    spend,
    uniform,
)
from corp_cli.sizes.costs import cost_of, linear_costs
from corp_cli.sizes.plan import best_plan
from corp_cli.sizes.target import merges_tokens, updated_tokens
from tests.support import variants
from tests.support.budgets import BLOCKS, DENSE, SPEC, run
from tests.support.figures import known


@settings(deadline=None, max_examples=25)
@given(
    tables=st.lists(
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50)), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    share=st.floats(0, 1),
)
def test_the_knapsack_finds_what_brute_force_finds(tables: list[list[tuple[int, int]]], share: float) -> None:
    choices = [
        Choice(
            i,
            ("mlp",),
            tuple((k,) for k in range(len(t))),
            tuple(float(d) for _, d in t),
            tuple(float(c) for c, _ in t),
        )
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


def test_nothing_more_is_cut_than_asked_where_nothing_does_damage() -> None:
    choices = [Choice(i, ("mlp",), ((8,), (16,), (32,)), (0.0, 0.0, 0.0), (8.0, 16.0, 32.0)) for i in range(4)]
    taken, predicted = solve(choices, 100.0)
    assert predicted == 0
    assert sum(choice.cost[i] for choice, i in zip(choices, taken, strict=True)) == 96


def test_a_budget_out_of_reach_is_refused() -> None:
    with pytest.raises(CorpError, match="budget cannot be met"):
        solve([Choice(0, ("mlp",), ((8,), (16,)), (1.0, 0.0), (8.0, 16.0))], 7.0)


def test_the_solver_has_nothing_to_say_to_users(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    print("before")
    with no_stdout():
        libc.puts(b"a line for developers")
    libc.puts(b"after")
    libc.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


@pytest.mark.parametrize("tokens", [None, 1])
@pytest.mark.parametrize("kind", ["macs", "params"])
def test_costs_are_linear_in_every_size(kind: str, tokens: int | None) -> None:
    costs = linear_costs(SPEC, BLOCKS, DENSE, kind, tokens)
    sizes = (Sizes(40, 5, 9, 2), Sizes(17, 16, 2, 2))

    def spent(of: tuple[Sizes, ...]) -> float:
        return sum(cost.at([(getattr(of[cost.block], cost.groups[0]),)])[0] for cost in costs)

    dense, cut = (cost_of(SPEC, BLOCKS, of, kind, tokens) for of in (DENSE, sizes))
    assert dense - cut == pytest.approx(spent(DENSE) - spent(sizes))


@pytest.mark.parametrize("key", ["macs", "params"])
@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_what_is_spent_stays_within_the_budget(key: str, fraction: float) -> None:
    cfg = SparsityConfig(macs=fraction, round_to=2) if key == "macs" else SparsityConfig(params=fraction, round_to=2)
    budget = make_budget(SPEC, BLOCKS, cfg, DENSE)
    allowed = (1 - fraction) * cost_of(SPEC, BLOCKS, DENSE, key)
    damage = {(i, g): torch.linspace(1, 0, getattr(DENSE[i], g) + 1) ** 2 * (1 + i) for i, g in budget.wanted()}
    sizes, _ = spend(budget, damage)
    assert allowed * 0.9 < cost_of(SPEC, BLOCKS, sizes, key) <= allowed
    context = cost_of(SPEC, BLOCKS, uniform(budget, matching_fraction(budget)), key)
    assert context <= allowed
    assert budget.speedup(sizes) is None


def test_tokens_are_counted() -> None:
    assert all_tokens(variants.build("vit")) == 5
    assert all_tokens(variants.build("gap_no_class_token")) == 0


def test_a_model_of_one_block_merges_no_tokens() -> None:
    one = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    assert most_merged(one) == 0
    assert not merges_tokens(one, SparsityConfig(macs=0.3))


@pytest.mark.usefixtures("tiny_digits")
def test_a_budget_is_met_and_its_plan_can_be_given_back(tmp_path: Path) -> None:
    first = prune(run(SparsityConfig(macs=0.4, curve_images=16)), tmp_path).report
    assert 39 < first.size.removed_percent.macs < 45
    assert first.size.removed_percent.macs >= 40
    assert known(first.sparsity.predicted_kl) > 0
    again = prune(run(SparsityConfig(plan=str(tmp_path / "plan.yaml")))).report
    assert [block.pruned for block in again.blocks] == [block.pruned for block in first.blocks]
    assert again.evaluation.pruned.kl == first.evaluation.pruned.kl


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


@pytest.mark.usefixtures("tiny_digits")
@pytest.mark.parametrize("key", ["macs", "params"])
def test_a_budget_out_of_reach_is_told_before_any_long_work(key: str) -> None:
    asked: dict[str, Any] = {key: 0.97}
    with pytest.raises(CorpError, match=rf"sparsity\.{key}=0\.97 cannot be met: at most 0\.\d+ of this model"):
        prune(run(SparsityConfig(**asked)))


def test_a_budget_that_only_the_strongest_merging_meets_is_met() -> None:
    budget = make_budget(SPEC, BLOCKS, SparsityConfig(macs=0.3), DENSE, 1, merges=True)
    costs = budget.token_costs
    assert costs is not None
    tightest = budget.merging(costs.most())
    fraction = 1 - (tightest.fixed + tightest.least) / budget.dense - 1e-6
    budget = make_budget(SPEC, BLOCKS, SparsityConfig(macs=fraction), DENSE, 1, merges=True)
    damage = {(i, g): torch.linspace(1e3, 0, getattr(DENSE[i], g) + 1).double() for i, g in budget.wanted()}
    damage[0, TOKENS] = torch.linspace(1e3, 0, costs.tokens + 1).double()  # dearer than any price
    found = best_plan(budget, damage)
    assert found.merge == costs.most()
    assert cost_of(SPEC, BLOCKS, found.sizes, "macs", 1, found.merge) <= (1 - fraction) * budget.dense


@pytest.mark.usefixtures("tiny_digits")
def test_tokens_that_the_head_never_reads_are_left_alone_in_the_last_block() -> None:
    report = prune(run(SparsityConfig(macs=0.5, curve_images=16))).report
    assert report.sparsity.last_block_tokens == 1
    assert known(report.sparsity.merged_tokens)[-1] == 0
    whole = prune(run(SparsityConfig(macs=0.5, curve_images=16, skip_unread=False))).report
    assert whole.sparsity.last_block_tokens is None
    assert known(whole.sparsity.predicted_kl) > known(report.sparsity.predicted_kl)


@pytest.mark.parametrize(
    ("asked", "classes", "tokens"),
    [
        ({"macs": 0.3}, 7, 1),
        ({"latency": 0.3}, 7, 1),
        ({"macs": 0.3}, 0, None),
        ({"params": 0.3}, 7, None),
        ({"joint": 0.5}, 7, None),
        ({"joint": 0.5, "skip_unread": True}, 7, 1),
        ({"macs": 0.3, "skip_unread": False}, 7, None),
    ],
)
def test_unread_tokens_are_skipped_where_that_serves(asked: dict[str, Any], classes: int, tokens: int | None) -> None:
    model = variants.build("vit")
    model.num_classes = classes  # type: ignore[assignment]
    assert updated_tokens(model, SparsityConfig(**asked)) == tokens


def test_a_head_that_reads_every_token_says_so() -> None:
    model = variants.build("gap_no_class_token")
    assert updated_tokens(model, SparsityConfig(macs=0.3)) is None
    with pytest.raises(CorpError, match="skip_unread=true does not suit VisionTransformer: its head reads every token"):
        updated_tokens(model, SparsityConfig(skip_unread=True))


def test_tokens_are_not_merged_where_a_head_reads_them_all() -> None:
    model = variants.build("gap_no_class_token")
    assert not merges_tokens(model, SparsityConfig(macs=0.3))
    with pytest.raises(CorpError, match="merge_tokens=true does not suit VisionTransformer: its head reads every"):
        merges_tokens(model, SparsityConfig(macs=0.3, merge_tokens=True))
    backbone = variants.build("vit")
    for asked in (SparsityConfig(joint=0.5, merge_tokens=True), SparsityConfig(params=0.5, merge_tokens=True)):
        with pytest.raises(CorpError, match="merge_tokens=true needs a budget that tokens count for"):
            merges_tokens(backbone, asked)
    assert merges_tokens(backbone, SparsityConfig(macs=0.3))
    assert not merges_tokens(backbone, SparsityConfig(macs=0.3, merge_tokens=False))
    assert not merges_tokens(backbone, SparsityConfig(params=0.3))
    backbone.num_classes = 0  # type: ignore[assignment]
    assert not merges_tokens(backbone, SparsityConfig(macs=0.3))


@pytest.mark.parametrize("key", ["alpha", "beta", "token_floor"])
def test_shares_are_fractions(key: str) -> None:
    asked: dict[str, Any] = {key: -0.5}
    with pytest.raises(CorpError, match=rf"compensation\.{key}=-0\.5 is out of range"):
        CompensationConfig(**asked)
