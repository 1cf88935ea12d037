"""Folding into weights and biases: logits and outputs of the cut attention against explicit formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from corp_cli.config.prune import CompensationConfig, RankerConfig, SparsityConfig
from corp_cli.linalg.logits import missing_logits
from corp_cli.method.calibrate import calibrate
from corp_cli.method.compensate import compensate, compensate_mlp, compensate_qk, compensate_vo
from corp_cli.method.cut import only
from corp_cli.method.keep import keep
from corp_cli.method.rank import RankerArgs, rank
from corp_cli.method.statistics import LogitStatistics
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import AttentionWeights, MlpWeights
from corp_cli.sizes.uniform import check_supported, uniform_sizes
from tests.linalg.test_linalg import correlated, moments_of, normal
from tests.support import variants
from tests.support.variants import logits

N, WIDTH, HEADS, D = 60, 8, 3, 5
X = correlated(1, N, WIDTH)
WEIGHTS = AttentionWeights(
    normal(2, HEADS, D, WIDTH),
    normal(3, HEADS, D, WIDTH),
    normal(4, HEADS, D, WIDTH),
    normal(5, HEADS, D),
    normal(6, HEADS, D),
    normal(7, HEADS, D),
    normal(8, 6, HEADS, D),
    normal(9, 6),
)


def rows(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[H, N, d]"""
    assert bias is not None
    return torch.einsum("nd,hkd->hnk", X, weight) + bias[:, None]


def logit_statistics() -> LogitStatistics:
    q, k = rows(WEIGHTS.q, WEIGHTS.q_bias), rows(WEIGHTS.k, WEIGHTS.k_bias)
    centred = k - k.mean(1, keepdim=True)
    gram_q, gram_k, gram_k_centred = (t.mT @ t / N for t in (q, k, centred))
    return LogitStatistics(gram_q, gram_k, gram_k_centred, torch.ones(HEADS, D, dtype=torch.float64))


def test_sylvester_is_folded_into_weights_and_biases() -> None:
    """Alg. 5: the logits of the cut heads are Q_S (I + M) K_Sᵀ, biases included."""
    heads, qk = torch.tensor([0, 2]), torch.tensor([[0, 2, 4], [1, 2, 3]])
    cfg = CompensationConfig(qk="sylvester", ridge_lambda=1e-3)
    new, error = compensate_qk(WEIGHTS, logit_statistics(), heads, qk, cfg)
    statistics = logit_statistics()
    pruned = torch.tensor([[1, 3], [0, 4]])
    m = missing_logits(statistics.gram_q[heads], statistics.gram_k[heads], qk, pruned, 1e-3)
    q, k = rows(WEIGHTS.q, WEIGHTS.q_bias), rows(WEIGHTS.k, WEIGHTS.k_bias)
    for i, (h, kept) in enumerate(zip(heads.tolist(), qk, strict=True)):
        expected = q[h][:, kept] @ (torch.eye(3).double() + m[i]) @ k[h][:, kept].T
        found = rows(new.q, new.q_bias)[i] @ rows(new.k, new.k_bias)[i].T
        torch.testing.assert_close(found, expected)
    assert error.after < error.before


def centred_logits(weights: AttentionWeights) -> Tensor:
    """[H, N, N], of keys less their mean."""
    k = rows(weights.k, weights.k_bias)
    return rows(weights.q, weights.q_bias) @ (k - k.mean(1, keepdim=True)).mT


def test_low_rank_logits_beat_every_selection_on_centred_keys() -> None:
    qk = torch.arange(2).repeat(HEADS, 1)
    every = torch.arange(HEADS)
    losses = {}
    for how in ("none", "sylvester", "lowrank"):
        new, _ = compensate_qk(WEIGHTS, logit_statistics(), every, qk, CompensationConfig(qk=how, ridge_lambda=0.0))
        dense, cut = (centred_logits(weights) for weights in (WEIGHTS, new))
        losses[how] = float((dense - cut).square().sum())
    assert losses["lowrank"] < min(losses["none"], losses["sylvester"])


def outputs(weights: AttentionWeights) -> Tensor:
    """proj of the values themselves (attention that looks at its own token): [N, O]."""
    o = rows(weights.v, weights.v_bias).permute(1, 0, 2)
    assert weights.proj_bias is not None
    return torch.einsum("nhk,ohk->no", o, weights.proj) + weights.proj_bias


@pytest.mark.parametrize("how", ["affine", "lowrank"])
def test_values_that_are_redundant_are_cut_without_loss(how: str) -> None:
    """Five dimensions of every head, of which only two vary independently."""
    thin = torch.einsum("hki,hij->hkj", normal(12, HEADS, D, 2), normal(13, HEADS, 2, WIDTH))
    weights = replace(WEIGHTS, v=thin)
    moments = moments_of(rows(weights.v, weights.v_bias).permute(1, 0, 2).flatten(1))
    vo = torch.tensor([[0, 3]] * HEADS)
    cfg = CompensationConfig(vo=how, ridge_lambda=1e-12)
    new, error = compensate_vo(weights, moments, torch.arange(HEADS), vo, cfg)
    assert new.v.shape == (HEADS, 2, WIDTH)
    assert error.after < 1e-6
    torch.testing.assert_close(outputs(new), outputs(weights), rtol=1e-4, atol=1e-4)


def test_low_rank_values_lose_less_than_selected_ones() -> None:
    moments = moments_of(rows(WEIGHTS.v, WEIGHTS.v_bias).permute(1, 0, 2).flatten(1))
    vo = torch.arange(2).repeat(HEADS, 1)
    lost = {}
    for how in ("none", "mean", "affine", "lowrank"):
        cfg = CompensationConfig(vo=how, ridge_lambda=1e-9)
        new, _ = compensate_vo(WEIGHTS, moments, torch.arange(HEADS), vo, cfg)
        lost[how] = float((outputs(new) - outputs(WEIGHTS)).square().sum())
    assert lost["lowrank"] < lost["affine"] < lost["mean"] < lost["none"]


@pytest.mark.parametrize("how", ["affine", "lowrank"])
def test_removed_heads_are_repaired(how: str) -> None:
    moments = moments_of(rows(WEIGHTS.v, WEIGHTS.v_bias).permute(1, 0, 2).flatten(1))
    heads, vo = torch.tensor([0, 2]), torch.arange(D).repeat(2, 1)
    cfg = CompensationConfig(vo=how, ridge_lambda=1e-9)
    new, error = compensate_vo(WEIGHTS, moments, heads, vo, cfg)
    assert new.v.shape == (2, D, WIDTH)
    assert error.after < error.before
    lost = (outputs(new) - outputs(WEIGHTS)).square().sum()
    energy = (outputs(WEIGHTS) - outputs(WEIGHTS).mean(0)).square().sum()
    assert float(lost / energy) == pytest.approx(error.after, rel=1e-4)


def test_masks_scale_the_heads_and_channels_that_stay() -> None:
    """One factor each, by least squares against the whole output; nothing else changes."""
    out = rows(WEIGHTS.v, WEIGHTS.v_bias)  # stands for the outputs of the heads, [H, N, d]
    moments = moments_of(out.transpose(0, 1).flatten(1))
    cfg = CompensationConfig(mlp="scale", vo="scale", ridge_lambda=0.0)
    heads, whole = torch.tensor([0, 2]), torch.arange(D).repeat(2, 1)
    new, error = compensate_vo(WEIGHTS, moments, heads, whole, cfg)
    added = torch.einsum("hnd,ohd->noh", out, WEIGHTS.proj)
    design, goal = added[..., heads].flatten(0, 1), added.sum(-1).flatten()
    factors = torch.linalg.lstsq(design, goal[:, None]).solution[:, 0]
    torch.testing.assert_close(new.proj, WEIGHTS.proj[:, heads] * factors[:, None])
    assert new.proj_bias is WEIGHTS.proj_bias
    left = (design @ factors - goal).square().sum() / N
    varying = (added.sum(-1) - added.sum(-1).mean(0)).square().sum() / N
    assert error.after == pytest.approx(float(left / varying))
    assert error.after < error.before

    mlp = MlpWeights((normal(10, 15, WIDTH),), (None,), WEIGHTS.proj.flatten(1), None)
    kept = torch.tensor([1, 4, 5, 11])
    cut, _ = compensate_mlp(mlp, moments, kept, cfg)
    of_channel = out.transpose(0, 1).flatten(1)[:, None] * mlp.fc2
    design, goal = of_channel[..., kept].flatten(0, 1), of_channel.sum(-1).flatten()
    factors = torch.linalg.lstsq(design, goal[:, None]).solution[:, 0]
    torch.testing.assert_close(cut.fc2, mlp.fc2[:, kept] * factors)
    assert cut.fc2_bias is None


@pytest.mark.parametrize("variant", ["deit", "swiglu", "vit_no_qkv_bias", "swin"])
def test_what_stays_alone_is_what_compensation_by_nothing_leaves(variant: str) -> None:
    model, x = variants.build(variant), variants.images(variant)
    blocks, ranker = blocks_of(model), RankerConfig(mlp="activation")
    sparsity = SparsityConfig(mlp=0.5, qk=0.5, vo=0.25, heads=0.5 if variant == "deit" else 0.0)
    groups, _ = check_supported(blocks, sparsity)
    statistics = calibrate(model, blocks, [x], groups)
    scores = rank(model, blocks, statistics, groups, ranker, RankerArgs.seeded(0, 1e-3))
    sizes = [uniform_sizes(block, groups, sparsity) for block in blocks]
    kept = tuple(keep(*each) for each in zip(scores, blocks, sizes, strict=True))
    nothing = CompensationConfig(mlp="none", qk="none", vo="none")
    wanted, _ = compensate(model, blocks, statistics, kept, nothing)
    torch.testing.assert_close(logits(only(model, blocks, kept), x), logits(wanted, x))
    assert not torch.allclose(logits(wanted, x), logits(model, x))
