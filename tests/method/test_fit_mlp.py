"""The refit of the MLP in front of its nonlinearity: what is drawn, what is kept aside, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_cli.cli.main import main
from corp_cli.config.prune import CompensationConfig, RankerConfig, SparsityConfig
from corp_cli.linalg.gauss_newton import Layers, gauss_newton
from corp_cli.linalg.ridge import refit
from corp_cli.measure import precision
from corp_cli.measure.precision import products
from corp_cli.method import fit_mlp, fit_one_shot
from corp_cli.method.calibrate import calibrate
from corp_cli.method.fit_one_shot import left_by_refit, trial_depends
from corp_cli.method.observe import joint_moments, observe, observe_cut
from corp_cli.method.rank import RankerArgs, rank
from corp_cli.method.sample import Sample, chances, sampled
from corp_cli.method.stream import ASIDE, enter_block, kept_aside, start_streams
from corp_cli.models.adapter import blocks_of, hidden_units, mlp_weights
from corp_cli.models.streams import sublayers
from tests.support import variants
from tests.support.repair import repaired
from tests.support.variants import logits

MLP_HALF = SparsityConfig(mlp=0.5, round_to=1, skip_unsupported=True)
AFFINE = CompensationConfig(mlp="affine", ridge_lambda=0.1)
GROUPS = frozenset({"mlp"})


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), share=st.floats(0.5, 30), zeros=st.integers(0, 5))
def test_chances_are_proportional_to_weights_up_to_one(seed: int, share: float, zeros: int) -> None:
    weights = torch.rand(3, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    weights[:, 0], weights[:, 1 : 1 + zeros] = 50.0, 0.0
    found = chances(weights, share)
    assert ((found >= 0) & (found <= 1)).all()
    assert not found[weights == 0].any()
    torch.testing.assert_close(found.sum(-1), torch.full((3,), min(share, 20.0 - zeros), dtype=torch.float64))
    for row, weight in zip(found, weights, strict=True):
        free = (row > 0) & (row < 1)
        ratios = row[free] / weight[free]
        torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))


def test_what_is_drawn_does_not_depend_on_batches() -> None:
    model, x = variants.build("deit"), variants.images("deit", 24)
    block = blocks_of(model)[0]
    drawn = []
    for size in (24, 5):
        stream = start_streams(model, blocks_of(model), x.split(size), CompensationConfig(), seed=3)
        enter_block(stream, model, block)
        sample, branch = Sample(40, seed=1), sublayers(model, block)[1]
        with torch.no_grad():
            joint_moments(stream, branch, sampled(stream, observe(stream, branch, CompensationConfig()), sample))
        drawn.append([torch.cat(part) for part in zip(*sample.tokens, strict=True)])
    assert 20 < len(drawn[0][0]) < 60
    for first, second in zip(*drawn, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("count", "aside"), [(1, 0), (2, 1), (9, 1), (100, 100 // ASIDE)])
def test_images_are_kept_aside_by_the_seed(count: int, aside: int) -> None:
    assert kept_aside(count, 0).sum() == aside
    assert torch.equal(kept_aside(count, 5), kept_aside(count, 5))


def test_what_a_trial_depends_on_is_told_apart() -> None:
    asked = [CompensationConfig(propagate=how, fit_tokens=count) for how in ("none", "sequential") for count in (8, 9)]
    assert len({tuple(trial_depends(cfg)) for cfg in asked}) == 4


@pytest.mark.parametrize(("units", "faster", "coarse"), [(512, True, True), (512, False, False), (64, True, False)])
def test_a_cpu_that_is_faster_in_bfloat16_looks_for_steps_of_large_layers_in_it(
    units: int, faster: bool, coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: faster)
    layers, cpu = Layers(torch.zeros(1, units, 200), torch.zeros(192, units), torch.zeros(192)), torch.device("cpu")
    assert fit_mlp.coarse_for(layers) is None  # by itself, all is exact
    with products("float32", cpu, exact=False):
        assert fit_mlp.coarse_for(layers) == (torch.bfloat16 if coarse else None)
        with products("float32", cpu, exact=True):
            assert fit_mlp.coarse_for(layers) is None
    assert fit_mlp.coarse_for(layers) is None


@pytest.mark.usefixtures("tiny_digits")
@pytest.mark.parametrize(("asked", "exact"), [("auto", False), ("float32", True)])
def test_who_asks_for_float32_gets_it_in_all(asked: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[bool] = []

    def watched(*args: Any) -> Any:
        searched.append(precision.searches_in_bfloat16())
        return gauss_newton(*args)

    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: True)
    monkeypatch.setattr(fit_mlp, "gauss_newton", watched)
    few = ["calibration.num_images=64", "evaluation.num_images=16", "evaluation.throughput_batches=0"]
    assert main(["prune", "sparsity.mlp=0.5", f"calibration.precision={asked}", "device=cpu", *few]) == 0
    assert set(searched) == {not exact}


def test_a_layer_that_takes_no_round_is_not_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens and the same fc1 give the same moments."""
    model, x = variants.build("deit"), variants.images("deit", 30)
    cfg, found, passes = CompensationConfig(propagate="none"), [], list[int]()

    def counted(*args: Any) -> Any:
        passes.append(1)
        return observe_cut(*args)

    monkeypatch.setattr(fit_mlp, "observe_cut", counted)
    monkeypatch.setattr(fit_mlp, "ROUNDS", {"none": 0})
    fit_block = fit_mlp.fit_block
    for known in (True, False):
        if not known:
            monkeypatch.setattr(fit_one_shot, "fit_block", lambda *args: fit_block(*args[:6]))
        found.append(repaired(model, x, 10, MLP_HALF, cfg)[0].state_dict())
        assert len(passes) == (0 if known else len(blocks_of(model)))
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-5)


def test_moments_of_images_kept_aside_are_none_of_those_fitted() -> None:
    model, x = variants.build("deit"), variants.images("deit", 30)
    block, branch = blocks_of(model)[0], sublayers(model, blocks_of(model)[0])[1]
    cfg = CompensationConfig(token_weights="uniform")
    stream = start_streams(model, blocks_of(model), x.split(7), cfg, seed=2)
    enter_block(stream, model, block)
    with torch.no_grad():
        joint = joint_moments(stream, branch, observe(stream, branch, cfg))
    assert joint.aside is not None
    assert (joint.every.count, joint.fitted.count, joint.aside.count) == (30 * 5, 27 * 5, 3 * 5)
    mean = (27 * joint.fitted.mean + 3 * joint.aside.mean) / 30
    torch.testing.assert_close(joint.every.mean, mean)
    weight = mlp_weights(model, block).fc2
    fitted, aside = (refit(weight, one, 0.1)[0] for one in (joint.fitted, joint.aside))
    assert not torch.allclose(fitted, aside)


@pytest.mark.parametrize("variant", ["swiglu", "dinov2_swiglu_packed", "eva02_swiglu_packed"])
def test_hidden_units_are_those_of_the_module(variant: str) -> None:
    model, z = variants.build(variant), torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    block = blocks_of(model)[0]
    weights, mlp = mlp_weights(model, block), model.get_submodule(block.mlp)
    pre = [
        torch.nn.functional.linear(z, w.float(), None if b is None else b.float())
        for w, b in zip(weights.fc1, weights.fc1_bias, strict=True)
    ]
    with torch.no_grad():
        found = torch.nn.functional.linear(
            hidden_units(model, block)(*pre),
            weights.fc2.float(),
            None if weights.fc2_bias is None else weights.fc2_bias.float(),
        )
        torch.testing.assert_close(found, mlp(z), rtol=1e-4, atol=1e-4)


def error(model: torch.nn.Module, pruned: torch.nn.Module, x: torch.Tensor) -> float:
    return float((logits(model, x) - logits(pruned, x)).square().mean())


@pytest.mark.parametrize("variant", [*variants.PATHS, "dinov2_swiglu_packed", "clip_quickgelu", "vit_no_proj_bias"])
def test_every_mlp_that_can_be_cut_is_refitted(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant, 40)
    blocks = blocks_of(model)
    pruned, errors = repaired(model, x, 8, MLP_HALF, CompensationConfig())
    assert logits(pruned, x).isfinite().all()
    for block, found in zip(blocks, errors, strict=True):
        fits = found["mlp"].fits if "mlp" in found else ()
        assert len(fits) == ("mlp" not in block.refusals)
        for fit in fits:
            assert fit.fitted[1] <= fit.fitted[0]
            assert fit.held_out[1] <= fit.held_out[0]


@pytest.mark.parametrize("propagate", ["sequential", "none"])
def test_the_refit_comes_closer_on_other_images(propagate: str) -> None:
    model, x = variants.build("deit"), variants.images("deit", 400)
    other, found = variants.images("deit", 200, seed=9), {}
    for cfg in (AFFINE, replace(AFFINE, mlp="gauss_newton")):
        pruned, errors = repaired(model, x, 50, MLP_HALF, replace(cfg, propagate=propagate))
        assert all(error["mlp"].fits for error in errors) == (cfg.mlp == "gauss_newton")
        found[cfg.mlp] = error(model, pruned, other)
    assert found["gauss_newton"] < 0.9 * found["affine"]


@pytest.mark.parametrize("variant", ["deit", "swiglu", "eva02_separate_qkv_sub_norm"])
def test_what_a_refit_will_leave_is_tried_at_half_of_the_channels(variant: str) -> None:
    """It is what the refit of a model so cut says of images kept aside; blocks without one keep all of their error."""
    model, x = variants.build(variant), variants.images(variant, 120)
    blocks, cfg = blocks_of(model), CompensationConfig(vo="affine")
    batches, groups = x.split(40), frozenset({"mlp"}) - blocks[0].refusals.keys()
    statistics = calibrate(model, blocks, batches, groups)
    scores = rank(model, blocks, statistics, groups, RankerConfig(), RankerArgs.seeded(0, cfg.ridge), None)
    left = left_by_refit(model, blocks, statistics, scores, batches, cfg, 0)
    if not groups:
        assert left == (1.0,) * len(blocks)
        return
    _, errors = repaired(model, x, 40, MLP_HALF, replace(cfg, propagate="none"))
    wanted = [found["mlp"].fits[0].held_out for found in errors]
    assert left == pytest.approx([after / before for before, after in wanted], rel=1e-3)
    assert all(0 < share <= 1 for share in left)
    assert min(left) < 0.95
