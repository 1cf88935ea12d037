"""Values and outputs refitted together: what heads gather, in groups or all at once, and what comes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, SparsityConfig
from corp_cli.method import fit_values
from corp_cli.method.compensate import Errors
from corp_cli.method.stream import enter_block, start_streams
from corp_cli.models.adapter import attention_weights, blocks_of
from tests.support import variants
from tests.support.repair import repaired
from tests.support.variants import logits

HALF = SparsityConfig(vo=0.5, round_to=1, skip_unsupported=True)
LOWRANK = CompensationConfig(mlp="affine", vo="lowrank", ridge_lambda=0.1)
REDUCED = replace(LOWRANK, vo="reduced_rank")


def repair(model: nn.Module, x: Tensor, cfg: CompensationConfig) -> tuple[nn.Module, Errors]:
    return repaired(model, x, 20, HALF, cfg)


def distance(model: nn.Module, pruned: nn.Module, x: Tensor) -> float:
    return float((logits(model, x) - logits(pruned, x)).square().mean())


@pytest.mark.parametrize("variant", ["deit", "vit_no_qkv_bias", "beit", "sam", "swin", "rope_mixed"])
def test_gathered_inputs_times_values_are_the_head_outputs(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant, 6)
    block = blocks_of(model)[0]
    stream = start_streams(model, blocks_of(model), x.split(3), LOWRANK)
    enter_block(stream, model, block)
    attn = attention_weights(model, block)
    bias = attn.v_bias if attn.v_bias is not None else attn.v.new_zeros(attn.v.shape[:2])
    out_bias = 0 if attn.proj_bias is None else attn.proj_bias
    heads = torch.arange(len(attn.v))
    with torch.no_grad():
        targets = [stream.pruned[i].new_zeros(()) for i in range(2)]
        for seen in fit_values.observe_gathered(stream, model, block, attn, heads, targets):
            u = seen.given.double().unflatten(-1, (len(attn.v), -1))
            values = torch.einsum("...hD,hkD->...hk", u, attn.v) + bias
            found = torch.einsum("...hk,ohk->...o", values, attn.proj) + out_bias
            given = -seen.target.flatten(1, -2).double()
            torch.testing.assert_close(found, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", [*variants.PATHS, "vit_no_proj_bias", "clip_quickgelu"])
def test_values_that_can_be_cut_are_refitted(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant, 60)
    pruned, errors = repair(model, x, REDUCED)
    assert logits(pruned, x).isfinite().all()
    for block, found in zip(blocks_of(model), errors, strict=True):
        assert ("vo" in found) == ("vo" not in block.refusals)
        if "vo" in found:
            assert len(found["vo"].fits) == 1
            for fit in found["vo"].fits:
                assert fit.held_out[1] <= fit.held_out[0]


@pytest.mark.parametrize("propagate", ["sequential", "none"])
def test_the_refit_comes_closer_on_other_images(propagate: str) -> None:
    model, x, other = variants.build("deit"), variants.images("deit", 400), variants.images("deit", 200, seed=9)
    plain, fitted = (repair(model, x, replace(cfg, propagate=propagate)) for cfg in (LOWRANK, REDUCED))
    assert all(fit.rounds for error in fitted[1] for fit in error["vo"].fits)
    assert distance(model, fitted[0], other) < distance(model, plain[0], other)


def test_groups_of_heads_come_as_near_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, other = variants.build("deit"), variants.images("deit", 400), variants.images("deit", 200, seed=9)
    at_once, _ = repair(model, x, REDUCED)
    monkeypatch.setattr(fit_values, "groups_of", lambda attn, block: torch.arange(len(attn.v)).split(1))
    by_group, errors = repair(model, x, REDUCED)
    assert all(len(error["vo"].fits) == 2 for error in errors)
    assert distance(model, by_group, other) == pytest.approx(distance(model, at_once, other), rel=0.1)


def test_the_moments_of_a_group_are_no_larger_than_those_of_the_mlp() -> None:
    model = variants.build("deit")
    block = blocks_of(model)[0]
    attn = attention_weights(model, block)
    for hidden, groups in ((0, 1), (128, 1), (64, 1), (63, 2), (1, 2)):
        sizes = replace(block.sizes, mlp=hidden)
        assert len(fit_values.groups_of(attn, replace(block, sizes=sizes))) == groups


def test_without_tokens_to_decide_by_values_stay() -> None:
    model, x = variants.build("deit"), variants.images("deit", 20)
    plain, few = repair(model, x, LOWRANK)[0], repair(model, x, replace(REDUCED, fit_tokens=1))
    assert all(not error["vo"].fits or not error["vo"].fits[0].rounds for error in few[1])
    variants.require_same(logits(few[0], x), logits(plain, x))


def test_one_image_is_not_refitted() -> None:
    model, x = variants.build("deit"), variants.images("deit", 1)
    for propagate in ("sequential", "none"):
        _, errors = repair(model, x, replace(REDUCED, propagate=propagate))
        assert not any(error["vo"].fits for error in errors)
