"""How far apart the relations of tokens are: the manifold distillation loss of Hao et al. (2022, arXiv 2107.01378)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def relation_distance(tokens: Tensor, others: Tensor) -> Tensor:
    """‖FFᵀ - GGᵀ‖²_F / n² with the rows of F and G of unit norm: F [n, D] or [U, n, D], G [U, n, D] → [U], float64.

    The mean, over all pairs of tokens, of the squared change of their cosine. With S = (F + G) / 2 and E = G - F the
    difference is SEᵀ + ESᵀ, so that ‖·‖² = 2 tr(SᵀS EᵀE) + 2 tr((SᵀE)²): products [D, D] in place of [n, n], and no
    difference of large numbers where G is near F.
    """
    unit = F.normalize(others, dim=-1)
    change = unit - F.normalize(tokens, dim=-1)
    middle = unit - change / 2
    of_middle, of_change, both = middle.mT @ middle, change.mT @ change, (middle.mT @ change).double()
    total = (of_middle.double() * of_change).sum((1, 2)) + (both * both.mT).sum((1, 2))
    return 2 * total.clamp(min=0) / tokens.shape[-2] ** 2
