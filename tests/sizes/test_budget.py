"""Budgets: the knapsack against brute force, costs against counting, curves and plans."""

from __future__ import annotations

import copy
import ctypes
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from corp_cli import pipeline
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import CompensationConfig, PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.cache import Cache
from corp_cli.measure.macs import count_macs
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Sizes
from corp_cli.models.loading import skeleton
from corp_cli.models.spec import ModelSpec
from corp_cli.models.token_block import all_tokens, most_merged
from corp_cli.pipeline import prune
from corp_cli.report.schema import Report
from corp_cli.sizes import latency
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
from corp_cli.sizes.curves import ANCHORS, TOKENS, Curve, damage_curves, interpolate
from corp_cli.sizes.plan import SizePlan, best_plan
from corp_cli.sizes.plan_file import plan_text, read_plan
from corp_cli.sizes.target import merges_tokens, updated_tokens
from tests.support import variants
from tests.support.figures import known
from tests.support.variants import SMALL

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


def test_damage_is_interpolated_along_the_error_and_never_falls() -> None:
    errors = torch.tensor([16.0, 9.0, 4.0, 1.0, 0.0])  # by kept size 0..4
    curve = interpolate(errors, [4, 2], [0.1, 0.5])
    torch.testing.assert_close(curve, torch.tensor([1.6, 0.9, 0.4, 0.1, 0.0]).double())
    flat = interpolate(errors, [4, 3, 2], [0.1, 0.5, 0.3])
    assert (flat[:-1] >= flat[1:]).all()
    assert flat[2] == flat[3]


def test_plans_come_back(tmp_path: Path) -> None:
    sizes = (Sizes(40, 5, 9, 2), Sizes(128, 16, 16, 1))
    (tmp_path / "plan.yaml").write_text(plan_text(SizePlan(sizes, 1, (), 0.25), BLOCKS))
    again = read_plan(tmp_path / "plan.yaml", BLOCKS, 1, 5, 0)
    assert (again.sizes, again.updated_tokens) == (sizes, 1)
    (tmp_path / "part.yaml").write_text("blocks: {blocks.1: {mlp: 8}}")
    assert read_plan(tmp_path / "part.yaml", BLOCKS, 0, 0, 0).sizes == (DENSE[0], Sizes(8, 16, 16, 2))


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
        ("blocks: {3: {mlp: 8}, blocks.0: {mlp: 8}, x: {}}", "names 3, which the model does not have"),
        ("blocks: {blocks.0: {3: 8}}", r"names blocks\.0\.3; the groups are"),
        ("blocks: {blocks.0: [8]}", r"blocks\.0 is no list of group: size"),
        ("[" * 10**5, "nested too deeply"),
        ("a: &a [x]\n" + "".join(f"{i}: &{i} [*{i - 1}, *{i - 1}]\n" for i in range(1, 60)), "cannot be read"),
        ("a: &a {mlp: 8}\nblocks: {blocks.0: *a, blocks.1: *a}", "holds aliases, which a plan does without"),
        ("{blocks: {}, last_block_tokens: 1}", r"last_block_tokens=1; this model needs null \(all tokens\)"),
    ],
)
def test_broken_plans_are_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(CorpError, match=sentence):
        read_plan(path, BLOCKS, 0, 0, 0)


@pytest.mark.parametrize("tokens", [0, 6, 10**9])
def test_the_last_block_updates_no_more_tokens_than_there_are(tmp_path: Path, tokens: int) -> None:
    (tmp_path / "plan.yaml").write_text(f"{{blocks: {{}}, last_block_tokens: {tokens}}}")
    with pytest.raises(CorpError, match=f"last_block_tokens={tokens}; this model needs 1 to 5, or null"):
        read_plan(tmp_path / "plan.yaml", BLOCKS, 1, 5, 0)


def test_tokens_are_counted() -> None:
    assert all_tokens(variants.build("vit")) == 5
    assert all_tokens(variants.build("gap_no_class_token")) == 0


def test_a_model_of_one_block_merges_no_tokens() -> None:
    one = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    assert most_merged(one) == 0
    assert not merges_tokens(one, SparsityConfig(macs=0.3))


def run(sparsity: SparsityConfig) -> PruneConfig:
    return PruneConfig(
        sparsity=sparsity,
        calibration=CalibrationConfig(num_images=48, num_workers=0),
        evaluation=EvaluationConfig(num_images=32, num_workers=0, throughput_batches=0),
        device="cpu",
    )


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


@pytest.mark.usefixtures("tiny_digits")
def test_budgets_share_their_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One set serves all where tokens may be merged; else one those that ask for about the same."""
    measured: list[tuple[float, ...]] = []

    def counted(*args: Any) -> list[Curve]:
        measured.append(args[5])
        return damage_curves(*args)

    def spent(fraction: float, merge: bool | None = None, seed: int = 0) -> Report:
        asked = SparsityConfig(macs=fraction, curve_images=16, merge_tokens=merge)
        return prune(replace(run(asked), seed=seed), cache=Cache(tmp_path)).report

    monkeypatch.setattr(pipeline, "damage_curves", counted)
    first, _, again = spent(0.45), spent(0.2), spent(0.45)
    assert measured == [ANCHORS[0.0]]
    assert again.blocks == first.blocks
    assert {(curve.block, curve.group) for curve in again.sparsity.curves} >= {
        (block.name, group) for block in again.blocks for group in ("mlp", "qk", "vo")
    }
    for curve in again.sparsity.curves:
        assert curve.sizes == sorted(curve.sizes)
        assert curve.damage == sorted(curve.damage, reverse=True)
        assert curve.damage[-1] == 0
    for fraction in (0.65, 0.7, 0.2, 0.25):
        spent(fraction, merge=False)
    assert measured[1:] == [ANCHORS[0.4], ANCHORS[0.2]]
    spent(0.2, seed=1)
    assert len(measured) == 4
    for path in tmp_path.glob("curves-*"):
        path.write_text("{")
    spent(0.2)
    assert len(measured) == 5


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


@pytest.mark.usefixtures("tiny_digits")
def test_a_latency_budget_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that shows MACs, a latency budget is a MACs budget."""

    def seconds(models: dict[str, nn.Module], x: Tensor, *_: Any) -> dict[str, list[float]]:
        assert (x.dtype, len(x)) == (torch.bfloat16, 5)
        assert all(p.dtype == x.dtype for m in models.values() for p in m.parameters())
        return {
            name: [1e-9 * count_macs(copy.deepcopy(m).float().to("meta"), x.shape[1:])] for name, m in models.items()
        }

    monkeypatch.setattr(latency, "pass_seconds", seconds)
    asked = SparsityConfig(latency=0.4, curve_images=16, latency_batch_size=5, latency_dtype="bfloat16")
    report = prune(run(asked)).report
    assert 39 < report.size.removed_percent.macs < 48
    expected = report.size.dense.macs / report.size.pruned.macs
    assert report.sparsity.predicted_speedup == pytest.approx(expected, rel=0.05)
    with pytest.raises(CorpError, match=r"sparsity\.latency=0\.97 cannot be met: at most 0\.\d+ of this model"):
        prune(run(replace(asked, latency=0.97)))


def test_grids_reach_from_an_eighth_to_all() -> None:
    assert latency.grid(768, 6) == (96, 224, 360, 496, 632, 768)
    assert latency.grid(16, 4) == (2, 7, 8, 16)
    assert latency.grid(1, 4) == (1,)


@pytest.mark.parametrize(
    ("merge", "mergeable", "said"),
    [
        (3, 2, "asks merge=3, 0 of the blocks; for this model, give counts that add up to 2 at most"),
        (-1, 2, "asks merge=-1, 0"),
        (True, 2, "asks merge=True, 0"),
        (1, 0, "asks merge=1, 0 of the blocks; for this model, leave them out"),
    ],
)
def test_plans_say_how_many_tokens_are_merged(tmp_path: Path, merge: int, mergeable: int, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan_text(SizePlan(DENSE, 1, (2, 0)), BLOCKS))
    assert read_plan(tmp_path / "plan.yaml", BLOCKS, 1, 5, 2) == SizePlan(DENSE, 1, (2, 0))
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({"blocks": {"blocks.0": {"merge": merge}}}))
    with pytest.raises(CorpError, match=re.escape(said)):
        read_plan(tmp_path / "bad.yaml", BLOCKS, 1, 5, mergeable)


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


@pytest.mark.usefixtures("tiny_digits")
def test_a_missing_plan_is_told_before_any_long_work(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match=r"sparsity\.plan=.*nowhere\.yaml does not exist"):
        prune(run(SparsityConfig(plan=str(tmp_path / "nowhere.yaml"))))


@pytest.mark.usefixtures("tiny_digits")
def test_a_bad_image_among_those_for_curves_is_left_out(tmp_path: Path) -> None:
    from PIL import Image

    for i in range(40):
        Image.new("L", (8, 8), 6 * i).save(tmp_path / f"{i:02}.png")
    (tmp_path / "07.png").write_bytes(b"not an image")
    cfg = run(SparsityConfig(macs=0.3, curve_images=40))
    calibration = CalibrationConfig(path=str(tmp_path), num_images=40, max_bad=0.1, num_workers=0)
    evaluation = replace(cfg.evaluation, max_bad=0.1)  # no image is left over, so the same ones are judged on
    report = prune(replace(cfg, calibration=calibration, evaluation=evaluation)).report
    assert report.calibration.bad.count == 1
    assert len([w for w in report.warnings if "of calibration.path" in w]) == 1


@pytest.mark.parametrize("key", ["alpha", "beta", "token_floor"])
def test_shares_are_fractions(key: str) -> None:
    asked: dict[str, Any] = {key: -0.5}
    with pytest.raises(CorpError, match=rf"compensation\.{key}=-0\.5 is out of range"):
        CompensationConfig(**asked)
