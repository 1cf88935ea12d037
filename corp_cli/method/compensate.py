"""Stage 3, compensate: fold what the pruned units contributed into those that stay (paper Alg. 3 and 5)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.fit import Fit
from corp_cli.linalg.logits import logit_error, missing_logits, split_factors
from corp_cli.linalg.lowrank import logit_factors, output_factors
from corp_cli.linalg.masks import input_gram, least_squares_masks
from corp_cli.linalg.moments import Moments, diagonal_blocks, energy, relative, select_moments, transform_moments
from corp_cli.linalg.ridge import (
    Affine,
    affine_error,
    affine_prediction,
    energy_lost,
    fold,
    mean_prediction,
    no_prediction,
    refit,
)
from corp_cli.method.calibrate import accumulation_device
from corp_cli.method.keep import KeptUnits
from corp_cli.method.statistics import BlockStatistics, LogitStatistics, Statistics
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import AttentionWeights, Block, BlockWeights, MlpWeights
from corp_cli.models.offload import visit
from corp_cli.runtime import console, ranks


@dataclass(frozen=True)
class GroupError:
    """Reconstruction error of one group of one block, relative to the energy of what is reconstructed."""

    before: float  # pruned units dropped
    after: float  # with the compensation asked for
    fits: tuple[Fit, ...] = ()  # of an MLP by gauss_newton, of heads by reduced_rank: relative to what they should give


Errors = tuple[dict[str, GroupError], ...]  # one per block: "mlp", "qk", "vo" (which includes removed heads)


def pruned_indices(kept: Tensor, dense: int) -> Tensor:
    """The ascending indices below `dense` that are not in `kept`."""
    mask = torch.ones(dense, dtype=torch.bool, device=kept.device)
    mask[kept] = False
    return mask.nonzero().flatten()


# --- affine folds: mlp.fc2 and attn.proj ----------------------------------------------------------------------

AFFINE: dict[str, Callable[[Moments, Tensor, Tensor, float], Affine]] = {
    "none": no_prediction,
    "mean": mean_prediction,
    "affine": affine_prediction,
    "gauss_newton": affine_prediction,  # to begin with
}


def _compensated_fold(
    weight: Tensor, bias: Tensor | None, moments: Moments, kept: Tensor, owner: Tensor, how: str, ridge_lambda: float
) -> tuple[Tensor, Tensor | None, GroupError]:
    """(W̃, b̃) of a linear layer [o, d] whose inputs are pruned to `kept` [s], with the error before and after.

    owner [s]: the unit that an input belongs to, which `scale` gives one factor: a channel, or a head.
    """
    pruned = pruned_indices(kept, weight.shape[1])
    if how == "scale":
        return _scaled(weight, bias, moments, kept, pruned, owner, ridge_lambda)
    affine = AFFINE[how](moments, kept, pruned, ridge_lambda)
    dropped = no_prediction(moments, kept, pruned)
    total = energy(weight, moments.covariance)
    before, after = (energy_lost(weight, moments, kept, pruned, each) for each in (dropped, affine))
    error = GroupError(relative(before, total), relative(after, total))
    full_bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    new_weight, new_bias = fold(weight, full_bias, kept, pruned, affine)
    return new_weight, (None if bias is None and how == "none" else new_bias), error


def _scaled(
    weight: Tensor,
    bias: Tensor | None,
    moments: Moments,
    kept: Tensor,
    pruned: Tensor,
    owner: Tensor,
    ridge_lambda: float,
) -> tuple[Tensor, Tensor | None, GroupError]:
    """W̃ = W_S diag(m) with the masks m of `least_squares_masks`: of all repairs, only the scale of each unit."""
    new = weight[:, kept] * least_squares_masks(input_gram(weight, moments), kept, owner, ridge_lambda)
    left = weight.clone()
    left[:, kept] -= new
    lost = energy(left, moments.covariance) + (left @ moments.mean).square().sum()
    dropped = no_prediction(moments, kept, pruned)
    before = affine_error(weight, moments, kept, pruned, dropped)
    return new, bias, GroupError(before, relative(lost, energy(weight, moments.covariance)))


def compensate_mlp(
    weights: MlpWeights, moments: Moments, kept: Tensor, cfg: CompensationConfig
) -> tuple[MlpWeights, GroupError]:
    """Rows of fc1 that stay, and fc2 with the affine compensation folded in (Eq. 8-11, Alg. 3)."""
    kept = kept.to(weights.fc2.device)
    own = torch.arange(len(kept), device=kept.device)
    fc2, bias, error = _compensated_fold(weights.fc2, weights.fc2_bias, moments, kept, own, cfg.mlp, cfg.ridge)
    fc1 = tuple(weight[kept] for weight in weights.fc1)
    return MlpWeights(fc1, tuple(None if b is None else b[kept] for b in weights.fc1_bias), fc2, bias), error


def compensate_vo(
    weights: AttentionWeights, moments: Moments, heads: Tensor, vo: Tensor, cfg: CompensationConfig
) -> tuple[AttentionWeights, GroupError]:
    """Values cut to `vo` [h, v] in the kept `heads`, and proj compensated for both.

    The inputs of proj are the outputs of all heads side by side, so one affine fold repairs both groups (Eq. 8-11).
    With `lowrank`, removed heads are repaired so, and of `vo` only the size counts.
    """
    dense_vo = weights.v.shape[1]
    if cfg.vo not in ("lowrank", "reduced_rank"):
        return _select_values(weights, moments, (heads[:, None] * dense_vo + vo).flatten(), vo.shape, cfg.vo, cfg)
    channels = heads[:, None] * dense_vo + torch.arange(dense_vo, device=heads.device)
    weights, error = _select_values(weights, moments, channels.flatten(), channels.shape, "affine", cfg)
    if vo.shape[1] == dense_vo:
        return weights, error
    return _rotate_values(weights, select_moments(moments, channels.flatten()), vo.shape[1], cfg)


def _select_values(
    weights: AttentionWeights,
    moments: Moments,
    kept: Tensor,
    shape: torch.Size,
    how: str,
    cfg: CompensationConfig,
) -> tuple[AttentionWeights, GroupError]:
    owner = torch.arange(shape[0], device=kept.device).repeat_interleave(shape[1])
    whole = weights.proj.flatten(1)
    proj, bias, error = _compensated_fold(whole, weights.proj_bias, moments, kept, owner, how, cfg.ridge)
    v = weights.v.flatten(0, 1)[kept].unflatten(0, shape)
    v_bias = None if weights.v_bias is None else weights.v_bias.flatten()[kept].unflatten(0, shape)
    return replace(weights, v=v, v_bias=v_bias, proj=proj.unflatten(1, shape), proj_bias=bias), error


def _rotate_values(
    weights: AttentionWeights, moments: Moments, size: int, cfg: CompensationConfig
) -> tuple[AttentionWeights, GroupError]:
    """V ← EV per head with E of `output_factors`; proj refitted on all heads jointly, its bias to the mean.

    The refit is ridge regression of the old output on the new features, towards proj D.
    """
    heads, dense, _ = weights.v.shape
    proj = weights.proj.flatten(1)
    cov = moments.covariance
    E, D, _ = output_factors(diagonal_blocks(cov, dense), weights.proj.transpose(0, 1))
    encode, decode = torch.block_diag(*E[:, :size]), torch.block_diag(*D[:, :, :size])
    joint = transform_moments(moments, torch.cat([encode, proj]))
    start = proj @ decode
    new, _ = refit(start, joint, cfg.ridge)
    features, outputs = joint.mean[: len(encode)], joint.mean[len(encode) :]
    bias = (0 if weights.proj_bias is None else weights.proj_bias) + outputs - new @ features
    v, v_bias = _mapped(E[:, :size], weights.v, weights.v_bias)
    rotated = replace(weights, v=v, v_bias=v_bias, proj=new.unflatten(1, (heads, size)), proj_bias=bias)
    before, after = (relative(energy(proj - w @ encode, cov), energy(proj, cov)) for w in (start, new))
    return rotated, GroupError(before, after)


def _mapped(maps: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Maps [h, k, d] of a weight [h, d, D] and its bias [h, d], head by head."""
    return maps @ weight, None if bias is None else torch.einsum("hkd,hd->hk", maps, bias)


# --- logits: attn.qkv -----------------------------------------------------------------------------------------


def only_heads(weights: AttentionWeights, heads: Tensor) -> AttentionWeights:
    """Queries, keys and what else is `per_head` of the kept heads; values and proj are left to `compensate_vo`."""
    q_bias, k_bias = (None if b is None else b[heads] for b in (weights.q_bias, weights.k_bias))
    others = {name: tensor[heads.to(tensor.device)] for name, tensor in weights.per_head.items()}
    return replace(weights, q=weights.q[heads], k=weights.k[heads], q_bias=q_bias, k_bias=k_bias, per_head=others)


def _factors(
    statistics: LogitStatistics, qk: Tensor, selection: Tensor, cfg: CompensationConfig
) -> tuple[Tensor, Tensor]:
    """(A, B), [h, k, d] each, with logits (Aq)·(Bk) for the kept dimensions `qk` [h, k], as `cfg.qk` says.

    selection [h, k, d] takes q to those dimensions.
    """
    gram_q, gram_k = statistics.fitted(cfg.qk)
    if "lowrank" in cfg.qk:
        A, B, _ = logit_factors(gram_q, gram_k)
        return A[:, : qk.shape[1]], B[:, : qk.shape[1]]
    if cfg.qk == "none":
        return selection, selection
    pruned = torch.stack([pruned_indices(row, gram_q.shape[1]) for row in qk])
    identity = torch.eye(qk.shape[1]).to(gram_q)
    U, V = split_factors(identity + missing_logits(gram_q, gram_k, qk, pruned, cfg.ridge))
    return U.mT @ selection, V.mT @ selection


def compensate_qk(
    weights: AttentionWeights, statistics: LogitStatistics, heads: Tensor, qk: Tensor, cfg: CompensationConfig
) -> tuple[AttentionWeights, GroupError]:
    """W_Q ← A W_Q, W_K ← B W_K, biases alike, in the kept `heads`.

    `sylvester`: Q̂_S K̂_Sᵀ = Q_S (I + M) K_Sᵀ on the dimensions `qk` [h, k] (Eq. 13-16, Alg. 5). `lowrank`: the best map
    of rank k, which no selection of dimensions can beat; of `qk` only the size counts. `weighted_lowrank`: the same
    where logits count by `logit_weights`. The error is relative to the logits that are fitted: of centred keys for
    these two, else all.
    """
    weights = only_heads(weights, heads)
    of_heads = LogitStatistics(**{name: t[heads] for name, t in vars(statistics).items() if t is not None})
    gram_q, gram_k = of_heads.fitted(cfg.qk)
    dropped = torch.eye(gram_q.shape[1]).to(gram_q)[qk]
    A, B = _factors(of_heads, qk, dropped, cfg)
    error = GroupError(logit_error(gram_q, gram_k, dropped.mT @ dropped), logit_error(gram_q, gram_k, A.mT @ B))
    q, q_bias = _mapped(A, weights.q, weights.q_bias)
    k, k_bias = _mapped(B, weights.k, weights.k_bias)
    return replace(weights, q=q, k=k, q_bias=q_bias, k_bias=k_bias), error


# --- all blocks -----------------------------------------------------------------------------------------------


def compensate_block(
    dense: BlockWeights, statistics: BlockStatistics, kept: KeptUnits, cfg: CompensationConfig
) -> tuple[BlockWeights, dict[str, GroupError]]:
    """The weights of one block cut to `kept` and compensated; attn or mlp is None where nothing is pruned."""
    attn = mlp = None
    errors: dict[str, GroupError] = {}
    if kept.attn is not None and dense.attn is not None:
        attn = dense.attn
        heads, qk, vo = (index.to(attn.proj.device) for index in (kept.attn.heads, kept.attn.qk, kept.attn.vo))
        if statistics.head_output is not None:
            attn, errors["vo"] = compensate_vo(attn, statistics.head_output, heads, vo, cfg)
        if statistics.logits is not None:
            attn, errors["qk"] = compensate_qk(attn, statistics.logits, heads, qk, cfg)
        else:
            attn = only_heads(attn, heads)
    if kept.mlp is not None and dense.mlp is not None and statistics.hidden is not None:
        mlp, errors["mlp"] = compensate_mlp(dense.mlp, statistics.hidden, kept.mlp, cfg)
    return BlockWeights(attn, mlp), errors


def replace_block(model: nn.Module, block: Block, weights: BlockWeights) -> None:
    """Put the parts of `weights` that are there in the place of the block's."""
    if weights.attn is not None:
        replace_attention(model, block, weights.attn)
    if weights.mlp is not None:
        replace_mlp(model, block, weights.mlp)


def compensate(
    model: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    kept: tuple[KeptUnits, ...],
    cfg: CompensationConfig,
) -> tuple[nn.Module, Errors]:
    """A copy of `model` cut to `kept` and compensated block by block, with each group's reconstruction error."""
    pruned = copy.deepcopy(model)
    errors = []
    home = accumulation_device(next(model.parameters()).device)

    def solve(each: tuple[Block, BlockStatistics, KeptUnits]) -> tuple[BlockWeights, dict[str, GroupError]]:
        block, found, units = each
        return compensate_block(block_weights(model, block), found.to(home), units, cfg)

    solved = ranks.spread(solve, zip(visit(blocks, model, pruned), statistics, kept, strict=True))
    for block, (weights, error) in zip(blocks, console.track(solved, "compensate", len(blocks)), strict=True):
        replace_block(pruned, block, weights)
        errors.append(error)
    return pruned.eval(), tuple(errors)
