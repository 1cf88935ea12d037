"""Optimal Brain Surgeon on whole channels: which to remove when the rest may be refitted (Hassibi and Stork, 1993)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from corp_cli.linalg.moments import Moments

LAZY = 64  # removals between two full updates of the inverse


@dataclass(frozen=True)
class Removal:
    """order [d]: channels from the first to the last removed; error [d]: output error after each removal.

    `error[i]` is min over W̃ of E‖W x - W̃ x_S‖² + λ‖W_S - W̃‖² once order[:i+1] are gone (float64).
    """

    order: Tensor
    error: Tensor

    def kept(self, size: int) -> Tensor:
        """The `size` channels that are removed last, ascending."""
        return self.order[len(self.order) - size :].sort().values


def inverse(moments: Moments, ridge_lambda: float) -> Tensor:
    """(Σ + λI)⁻¹ with λ = `ridge_lambda` x mean(diag Σ), never so small that dead channels make Σ singular."""
    covariance = moments.covariance
    d = len(covariance)
    scale = covariance.diagonal().mean()
    ridge = max(ridge_lambda, d * torch.finfo(covariance.dtype).eps) * scale
    if scale == 0:
        return torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(covariance + ridge * torch.eye(d).to(covariance)))


def removal_order(weight: Tensor, moments: Moments, ridge_lambda: float) -> Removal:
    """Greedily remove argmin_j ‖W_:j‖² / H_jj, then W ← W - W_:j H_j: / H_jj and H ← H - H_:j H_j: / H_jj.

    H = (Σ + λI)⁻¹. After every removal W is the ridge solution on the channels left, so the quotient is exactly
    what the next removal costs. weight [o, d]. The updates of H and W are gathered and applied `LAZY` at a time as
    matrix products, to the channels still there: the plain loop spends all its time moving the whole of H.
    """
    H, W = inverse(moments, ridge_lambda), weight.clone()
    d = W.shape[1]
    alive = torch.arange(d, device=W.device)
    order, costs = alive.new_empty(d), W.new_empty(d)
    done = 0
    while done < d:
        steps = min(LAZY, d - done)
        n = len(alive)
        columns = H.new_zeros(n, steps)  # H_:j / sqrt(H_jj) of each removal, as it was when it happened
        outputs = W.new_zeros(W.shape[0], steps)  # W_:j / sqrt(H_jj)
        diagonal, norms = H.diagonal().clone(), W.square().sum(0)
        gone = torch.zeros(n, dtype=torch.bool, device=W.device)
        for step in range(steps):
            score = (norms / diagonal).masked_fill(gone, torch.inf)
            j = score.argmin()
            root = diagonal[j].sqrt()
            column = (H[:, j] - columns[:, :step] @ columns[j, :step]) / root
            output = (W[:, j] - outputs[:, :step] @ columns[j, :step]) / root
            # ‖W_:k - output column_k‖², with W as it stands after the removals before this one
            inner = output @ W - (output @ outputs[:, :step]) @ columns[:, :step].T
            norms = (norms - 2 * inner * column + output.square().sum() * column.square()).clamp_(min=0)
            diagonal = (diagonal - column.square()).clamp_(min=torch.finfo(H.dtype).tiny)
            columns[:, step], outputs[:, step] = column, output
            gone[j] = True
            order[done + step], costs[done + step] = alive[j], score[j]
        left = (~gone).nonzero().flatten()
        kept_columns = columns[left]
        H = H[left][:, left] - kept_columns @ kept_columns.T
        W = W[:, left] - outputs @ kept_columns.T
        alive = alive[left]
        done += steps
    return Removal(order, costs.cumsum(0))
