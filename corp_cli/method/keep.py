"""Which units stay at given sizes: those with the highest scores (paper Alg. 2 and 4, last lines)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corp_cli.method.rank import Scores
from corp_cli.models.blocks import Block, Sizes


@dataclass(frozen=True)
class KeptAttention:
    """The sorted indices that stay in an attention: heads [h], and qk [h, k], vo [h, v] within the kept heads."""

    heads: Tensor
    qk: Tensor
    vo: Tensor


@dataclass(frozen=True)
class KeptUnits:
    """What stays of a block: sorted hidden channels mlp [m], and its attention; None where nothing is pruned."""

    mlp: Tensor | None = None
    attn: KeptAttention | None = None


def top(scores: Tensor, size: int) -> Tensor:
    """Indices of the `size` largest scores of the last dimension, in ascending order; ties go to the lower index."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :size].sort(dim=-1).values


def keep(scores: Scores, block: Block, sizes: Sizes) -> KeptUnits:
    """The units of a block with the highest scores, as many as `sizes` says."""
    dense = block.sizes
    mlp = top(scores.mlp, sizes.mlp) if scores.mlp is not None and sizes.mlp < dense.mlp else None
    heads = torch.arange(dense.heads) if scores.heads is None else top(scores.heads, sizes.heads).cpu()
    qk = _kept_dimensions(scores.qk, heads, dense.qk, sizes.qk)
    vo = _kept_dimensions(scores.vo, heads, dense.vo, sizes.vo)
    pruned = (len(heads), qk.shape[1], vo.shape[1]) != (dense.heads, dense.qk, dense.vo)
    return KeptUnits(mlp, KeptAttention(heads, qk, vo) if pruned else None)


def _kept_dimensions(score: Tensor | None, heads: Tensor, dense: int, size: int) -> Tensor:
    if score is None:
        return torch.arange(dense).repeat(len(heads), 1)
    return top(score[heads.to(score.device)], size)
