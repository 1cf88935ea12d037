"""Affine prediction of pruned activations from kept ones by ridge regression (paper §3.3, App. B.1, Alg. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corp_cli.linalg.moments import Moments, energy, plus_diagonal, relative


@dataclass(frozen=True)
class Affine:
    """x_P ≈ B x_S + c (Eq. 8): B [p, s], c [p], float64."""

    B: Tensor
    c: Tensor


def solve_spd(a: Tensor, b: Tensor) -> Tensor:
    """A⁻¹ b for symmetric positive semi-definite A [n, n]; by pseudo-inverse where A is singular.

    Dead and duplicated channels make A singular when no ridge is asked for.
    """
    factor, info = torch.linalg.cholesky_ex(a)
    if info.item() == 0:
        solution = torch.cholesky_solve(b, factor)
        if solution.isfinite().all():
            return solution
    values, vectors = torch.linalg.eigh(a)
    cut = values[-1].clamp(min=0) * a.shape[0] * torch.finfo(a.dtype).eps
    inverse = torch.where(values > cut, 1 / values, 0.0)
    return vectors @ (inverse[:, None] * (vectors.T @ b))


def regularise(covariance: Tensor, ridge_lambda: float) -> tuple[Tensor, Tensor]:
    """(Σ + λI, λ) with λ = `ridge_lambda` x mean(diag Σ), so that it means the same for every layer and model."""
    ridge = ridge_lambda * covariance.diagonal().mean()
    return plus_diagonal(covariance, ridge), ridge


def affine_prediction(moments: Moments, kept: Tensor, pruned: Tensor, ridge_lambda: float) -> Affine:
    """B = Σ_PS (Σ_SS + λI)⁻¹, c = μ_P - B μ_S (Eq. 10, 22), with the *centred* Σ of App. B.1.

    λ: see `regularise`. kept [s] and pruned [p] are index vectors. Eq. 9's raw second moments with Eq. 10's c would be
    inconsistent.
    """
    cov, mean = moments.covariance, moments.mean
    cov_ss = cov[kept][:, kept]
    regularised, _ = regularise(cov_ss, ridge_lambda)
    B = solve_spd(regularised, cov[kept][:, pruned]).T
    return Affine(B, mean[pruned] - B @ mean[kept])


def mean_prediction(moments: Moments, kept: Tensor, pruned: Tensor, ridge_lambda: float = 0.0) -> Affine:
    """B = 0, c = μ_P: pruned activations are replaced by their mean."""
    return Affine(moments.mean.new_zeros(len(pruned), len(kept)), moments.mean[pruned])


def no_prediction(moments: Moments, kept: Tensor, pruned: Tensor, ridge_lambda: float = 0.0) -> Affine:
    """B = 0, c = 0: pruned activations are dropped."""
    return Affine(moments.mean.new_zeros(len(pruned), len(kept)), moments.mean.new_zeros(len(pruned)))


def refit(weight: Tensor, joint: Moments, ridge_lambda: float) -> tuple[Tensor, Tensor]:
    """W = (Σ_yx + λW₀)(Σ_xx + λI)⁻¹, b = μ_y - Wμ_x: ridge regression of y on x towards W₀ rather than towards zero.

    weight W₀ [o, d]; `joint` are the moments of x and y side by side, [d + o]. λ: see `regularise`.
    """
    d = weight.shape[1]
    cov_xx, cov_yx = joint.covariance[:d, :d], joint.covariance[d:, :d]
    regularised, ridge = regularise(cov_xx, ridge_lambda)
    new = solve_spd(regularised, (cov_yx + ridge * weight).T).T
    return new, joint.mean[d:] - new @ joint.mean[:d]


def best_ridge(weight: Tensor, fitted: Moments, others: Moments, grid: Sequence[float]) -> float:
    """The λ of `grid` with which `refit` of W₀ on `fitted` gives the least E‖y - Wx - b‖² on `others`."""
    return min(grid, key=lambda ridge: float(squared_error(*refit(weight, fitted, ridge), others)))


def squared_error(weight: Tensor, bias: Tensor, joint: Moments) -> Tensor:
    """E‖y - Wx - b‖² by the moments of x and y side by side, [d + o]."""
    d = weight.shape[1]
    own = torch.eye(len(bias), dtype=weight.dtype, device=weight.device)
    residual = torch.cat([-weight, own], 1)  # of (x, y), up to b
    offset = joint.mean[d:] - weight @ joint.mean[:d] - bias
    return energy(residual, joint.covariance) + offset.square().sum()


def fold(weight: Tensor, bias: Tensor, kept: Tensor, pruned: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """W̃ = W_S + W_P B, b̃ = b + W_P c (Eq. 11); weight [o, d], bias [o] → [o, s], [o]."""
    weight_p = weight[:, pruned]
    return weight[:, kept] + weight_p @ affine.B, bias + weight_p @ affine.c


def affine_error(weight: Tensor, moments: Moments, kept: Tensor, pruned: Tensor, affine: Affine) -> float:
    """E‖W_P(x_P - Bx_S - c)‖² / E‖W(x - μ)‖²: output energy lost, relative to the output's variance."""
    return relative(energy_lost(weight, moments, kept, pruned, affine), energy(weight, moments.covariance))


def energy_lost(weight: Tensor, moments: Moments, kept: Tensor, pruned: Tensor, affine: Affine) -> Tensor:
    """E‖W_P(x_P - Bx_S - c)‖², by products no larger than W_P: far fewer than the covariance of the residual takes."""
    cov, mean, weight_p = moments.covariance, moments.mean, weight[:, pruned]
    offset = weight_p @ (mean[pruned] - affine.B @ mean[kept] - affine.c)
    lost = energy(weight_p, cov[pruned][:, pruned]) + offset.square().sum()
    if affine.B.any():
        predicted = weight_p @ affine.B
        crossed = ((weight_p @ cov[pruned][:, kept]) * predicted).sum()
        lost = lost - 2 * crossed + energy(predicted, cov[kept][:, kept])
    return lost
