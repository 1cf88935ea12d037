"""Stage 3, compensate: fold what the pruned units contributed into those that stay (paper Alg. 3 and 5)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_cli.config import CompensationConfig
from corp_cli.linalg.logits import logit_error, missing_logits, split_factors
from corp_cli.linalg.moments import Moments
from corp_cli.linalg.ridge import (
    Affine,
    affine_error,
    affine_prediction,
    fold,
    mean_prediction,
    no_prediction,
)
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import AttentionWeights, Block, MlpWeights
from corp_cli.rank import KeptAttention, Plan
from corp_cli.statistics import BlockStatistics, LogitStatistics, Statistics


@dataclass(frozen=True)
class GroupError:
    """Reconstruction error of one group of one block, relative to the energy of what is reconstructed."""

    before: float  # pruned units dropped
    after: float  # with the compensation asked for


Errors = tuple[dict[str, GroupError], ...]  # one per block: "mlp", "qk", "vo" (which includes removed heads)


def pruned_indices(kept: Tensor, dense: int) -> Tensor:
    """The ascending indices below `dense` that are not in `kept`."""
    mask = torch.ones(dense, dtype=torch.bool, device=kept.device)
    mask[kept] = False
    return mask.nonzero().flatten()


# --- affine folds: mlp.fc2 and attn.proj ----------------------------------------------------------------------

AFFINE: dict[str, Callable[[Moments, Tensor, Tensor, float], Affine]] = {
    "none": lambda moments, kept, pruned, ridge_lambda: no_prediction(moments, kept, pruned),
    "mean": lambda moments, kept, pruned, ridge_lambda: mean_prediction(moments, kept, pruned),
    "affine": affine_prediction,
}


def _compensated_fold(
    weight: Tensor, bias: Tensor | None, moments: Moments, kept: Tensor, how: str, ridge_lambda: float
) -> tuple[Tensor, Tensor | None, GroupError]:
    """(W̃, b̃) of a linear layer [o, d] whose inputs are pruned to `kept`, with the error before and after."""
    pruned = pruned_indices(kept, weight.shape[1])
    affine = AFFINE[how](moments, kept, pruned, ridge_lambda)
    dropped = no_prediction(moments, kept, pruned)
    error = GroupError(
        affine_error(weight, moments, kept, pruned, dropped),
        affine_error(weight, moments, kept, pruned, affine),
    )
    full_bias = weight.new_zeros(weight.shape[0]) if bias is None else bias
    new_weight, new_bias = fold(weight, full_bias, kept, pruned, affine)
    return new_weight, (None if bias is None and how == "none" else new_bias), error


def compensate_mlp(
    weights: MlpWeights, moments: Moments, kept: Tensor, cfg: CompensationConfig
) -> tuple[MlpWeights, GroupError]:
    """Rows of fc1 that stay, and fc2 with the affine compensation folded in (Eq. 8-11, Alg. 3)."""
    kept = kept.to(weights.fc2.device)
    fc2, bias, error = _compensated_fold(weights.fc2, weights.fc2_bias, moments, kept, cfg.mlp, cfg.ridge_lambda)
    fc1 = tuple(weight[kept] for weight in weights.fc1)
    return MlpWeights(fc1, tuple(None if b is None else b[kept] for b in weights.fc1_bias), fc2, bias), error


def compensate_vo(
    weights: AttentionWeights, moments: Moments, heads: Tensor, vo: Tensor, cfg: CompensationConfig
) -> tuple[AttentionWeights, GroupError]:
    """Dimensions `vo` [h, v] of the kept `heads`, and proj with the affine compensation folded in (Eq. 8-11).

    The inputs of proj are the outputs of all heads side by side, so one fold repairs both groups.
    """
    dense_vo = weights.v.shape[1]
    kept = (heads[:, None] * dense_vo + vo).flatten()
    proj, bias, error = _compensated_fold(
        weights.proj.flatten(1), weights.proj_bias, moments, kept, cfg.vo, cfg.ridge_lambda
    )
    compensated = replace(
        weights,
        v=weights.v.flatten(0, 1)[kept].unflatten(0, vo.shape),
        v_bias=None if weights.v_bias is None else weights.v_bias.flatten()[kept].unflatten(0, vo.shape),
        proj=proj.unflatten(1, vo.shape),
        proj_bias=bias,
    )
    return compensated, error


# --- logits: attn.qkv -----------------------------------------------------------------------------------------


def no_missing_logits(gram_q: Tensor, gram_k: Tensor, kept: Tensor, pruned: Tensor, ridge_lambda: float) -> Tensor:
    """M = 0: the logits of pruned dimensions are dropped."""
    return gram_q.new_zeros(*kept.shape, kept.shape[1])


LOGITS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]] = {
    "none": no_missing_logits,
    "sylvester": missing_logits,
}


def only_heads(weights: AttentionWeights, heads: Tensor) -> AttentionWeights:
    """Queries and keys of the kept heads; values and proj are left to `compensate_vo`."""
    q_bias, k_bias = (None if b is None else b[heads] for b in (weights.q_bias, weights.k_bias))
    return replace(weights, q=weights.q[heads], k=weights.k[heads], q_bias=q_bias, k_bias=k_bias)


def compensate_qk(
    weights: AttentionWeights, statistics: LogitStatistics, heads: Tensor, qk: Tensor, cfg: CompensationConfig
) -> tuple[AttentionWeights, GroupError]:
    """Q̂_S K̂_Sᵀ = Q_S (I + M) K_Sᵀ on dimensions `qk` [h, k] of the kept `heads` (Eq. 13-16, Alg. 5).

    The factors are folded into weights and biases alike. Without compensation the rows are only selected.
    """
    weights = only_heads(weights, heads)
    gram_q, gram_k = statistics.gram_q[heads], statistics.gram_k[heads]
    pruned = torch.stack([pruned_indices(row, gram_q.shape[1]) for row in qk])
    identity = torch.eye(qk.shape[1], dtype=gram_q.dtype, device=gram_q.device).expand(len(heads), -1, -1)
    bilinear = identity + LOGITS[cfg.qk](gram_q, gram_k, qk, pruned, cfg.ridge_lambda)
    error = GroupError(logit_error(gram_q, gram_k, qk, identity), logit_error(gram_q, gram_k, qk, bilinear))
    U, V = (identity, identity) if cfg.qk == "none" else split_factors(bilinear)

    def rows(weight: Tensor, factor: Tensor) -> Tensor:
        """Factorᵀ applied to the kept rows [h, k, ...] of a weight or bias [h, d, ...]."""
        chosen = torch.stack([of_head[row] for of_head, row in zip(weight, qk, strict=True)])
        return torch.einsum("hks,hk...->hs...", factor, chosen)

    q_bias = None if weights.q_bias is None else rows(weights.q_bias, U)
    k_bias = None if weights.k_bias is None else rows(weights.k_bias, V)
    return replace(weights, q=rows(weights.q, U), k=rows(weights.k, V), q_bias=q_bias, k_bias=k_bias), error


# --- all blocks -----------------------------------------------------------------------------------------------


def compensate_attention(
    weights: AttentionWeights, statistics: BlockStatistics, kept: KeptAttention, cfg: CompensationConfig
) -> tuple[AttentionWeights, dict[str, GroupError]]:
    """The attention of one block cut to `kept`: values and proj first, then queries and keys."""
    heads, qk, vo = (index.to(weights.proj.device) for index in (kept.heads, kept.qk, kept.vo))
    errors: dict[str, GroupError] = {}
    if statistics.head_output is not None:
        weights, errors["vo"] = compensate_vo(weights, statistics.head_output, heads, vo, cfg)
    if statistics.logits is not None:
        weights, errors["qk"] = compensate_qk(weights, statistics.logits, heads, qk, cfg)
    else:
        weights = only_heads(weights, heads)
    return weights, errors


def compensate(
    model: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    plan: Plan,
    cfg: CompensationConfig,
) -> tuple[nn.Module, Errors]:
    """A copy of `model` cut to `plan` and compensated block by block, with each group's reconstruction error."""
    pruned = copy.deepcopy(model)
    errors = []
    for block, statistic, kept in zip(blocks, statistics, plan, strict=True):
        dense, found = block_weights(model, block), {}
        if kept.mlp is not None and dense.mlp is not None and statistic.hidden is not None:
            mlp, found["mlp"] = compensate_mlp(dense.mlp, statistic.hidden, kept.mlp, cfg)
            replace_mlp(pruned, block, mlp)
        if kept.attn is not None and dense.attn is not None:
            attn, of_attention = compensate_attention(dense.attn, statistic, kept.attn, cfg)
            found.update(of_attention)
            replace_attention(pruned, block, attn)
        errors.append(found)
    return pruned.eval(), tuple(errors)
