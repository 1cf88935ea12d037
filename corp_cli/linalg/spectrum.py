"""How redundant a layer is, by the covariance of its activations (paper section 3.1), or its attention maps."""

from __future__ import annotations

import torch
from torch import Tensor


def spectrum(covariance: Tensor) -> Tensor:
    """The eigenvalues of covariance [..., d, d], largest first and none below zero, [..., d]."""
    return torch.linalg.eigvalsh(covariance).flip(-1).clamp(min=0)


def effective_rank(eigenvalues: Tensor) -> Tensor:
    """(Σ λ_i)² / Σ λ_i², the participation ratio: n where n directions share all variance alike; 0 without any.

    eigenvalues [..., d] of a covariance → [...]. It is the effective rank that has values like those of the paper's
    Table 4 beside its k95; the paper gives no formula.
    """
    squares = eigenvalues.square().sum(-1)
    return eigenvalues.sum(-1).square() / torch.where(squares > 0, squares, 1.0)


def entropy_rank(eigenvalues: Tensor) -> Tensor:
    """exp(-Σ p_i ln p_i), p_i = λ_i / Σ λ: the effective rank of Roy and Vetterli (2007); [..., d] → [...]."""
    total = eigenvalues.sum(-1, keepdim=True)
    share = eigenvalues / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(share).sum(-1).exp(), 0.0)


def components_for(eigenvalues: Tensor, share: float) -> Tensor:
    """The least k with λ_1 + … + λ_k >= share Σ λ_i; eigenvalues [..., d], largest first → [...] int64."""
    reached = eigenvalues.cumsum(-1)
    return (reached < share * reached[..., -1:]).sum(-1) + (reached[..., -1] > 0)


def largest_correlations(covariance: Tensor) -> Tensor:
    """max_{j≠i} |Σ_ij| / √(Σ_ii Σ_jj) of every channel i; 0 of one that does not vary; [..., d, d] → [..., d]."""
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = torch.where(deviation > 0, 1 / deviation, 0.0)
    correlation = (covariance * scale[..., :, None] * scale[..., None, :]).abs()
    correlation.diagonal(dim1=-2, dim2=-1).zero_()
    return correlation.amax(-1).clamp(max=1)


def attention_entropy(maps: Tensor) -> Tensor:
    """-Σ_j a_ij ln a_ij of every query i, in nats; maps [..., N, M] with rows that sum to 1 → [..., N]."""
    return torch.special.entr(maps).sum(-1)
