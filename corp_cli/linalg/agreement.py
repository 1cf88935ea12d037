"""How far two rankings of the same units agree (paper appendix C)."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(scores: Tensor) -> Tensor:
    """The place of every score among those of its row, ties at the mean of theirs; [..., d] → [..., d] float64."""
    below = (scores[..., None, :] < scores[..., :, None]).sum(-1)
    tied = (scores[..., None, :] == scores[..., :, None]).sum(-1)
    return below + (tied - 1).double() / 2


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Pearson's correlation of the ranks of a and b [..., d] → [...]; 0 where one of them ties all units."""
    centred_a, centred_b = (r - r.mean(-1, keepdim=True) for r in (ranks(a), ranks(b)))
    scale = centred_a.norm(dim=-1) * centred_b.norm(dim=-1)
    return (centred_a * centred_b).sum(-1) / torch.where(scale > 0, scale, 1.0)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """|A ∩ B| / k of index sets a, b [..., k] without repetition → [...]; by chance k / d of d units."""
    return (a[..., :, None] == b[..., None, :]).any(-1).double().mean(-1)
