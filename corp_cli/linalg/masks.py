"""Units without labels or gradients: which of a layer represent the others, and masks fitted by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from corp_cli.linalg.moments import Moments
from corp_cli.linalg.ridge import regularise, solve_spd

CONVERGED, MOST_STEPS = 0.01, 200  # relative change of ΣC at which the paper stops; a bound for what never settles


def representatives(points: Tensor) -> Tensor:
    """diag(C) of C ← C ∘ (K / KC)^½ from C = 1/n: how much each of points [n, D] stands for itself, [n].

    K_ij = exp(-‖p_i - p_j‖² / σ²); C is the kernel convex factorisation Φ ≈ ΦC, and a point that others can stand for
    has a small entry (Nova et al., arXiv 2303.04185, Alg. 1). σ² is the mean squared distance between the points, so
    that layers of any scale are alike; the paper has σ = 1.
    """
    distance = torch.cdist(points, points).square()
    kernel = torch.exp(-distance / distance.mean().clamp(min=torch.finfo(points.dtype).tiny))
    found = torch.full_like(kernel, 1 / len(points))
    for _ in range(MOST_STEPS):
        before = found.sum()
        found = found * (kernel / (kernel @ found)).sqrt()
        if (found.sum() - before).abs() <= CONVERGED * before:
            break
    return found.diagonal()


def input_gram(weight: Tensor, moments: Moments) -> Tensor:
    """G_ij = E[W_:i x_i · W_:j x_j]: what the inputs of a layer [o, d] add to its output, pair by pair, [d, d].

    With the mean of x, since a mask scales it as well.
    """
    return (weight.T @ weight) * (moments.covariance + torch.outer(moments.mean, moments.mean))


def least_squares_masks(gram: Tensor, kept: Tensor, owner: Tensor, ridge_lambda: float) -> Tensor:
    """argmin_m E‖y - Σ_u m_u y_u‖² + λ‖m - 1‖², one factor for each kept input, [s].

    y is the whole output and y_u what the kept inputs of unit u add to it: m = 1 + (PᵀG_SS P + λI)⁻¹ PᵀG_SP 1, with
    P [s, units] who owns the inputs `kept` [s]; owner [s] counts units from 0. λ: see `regularise`. The mask tuning of
    Kwon et al. (arXiv 2204.09656, section 4.3), damped towards one as theirs is.
    """
    belongs = torch.nn.functional.one_hot(owner).to(gram)
    rows = gram[kept]
    among = rows[:, kept]
    regularised, _ = regularise(belongs.T @ among @ belongs, ridge_lambda)
    missing = belongs.T @ (rows.sum(1) - among.sum(1))
    return 1 + (belongs @ solve_spd(regularised, missing[:, None]))[:, 0]
