"""Slow float64 oracles for the method, written from the paper alone. Imports nothing from the package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def affine_by_lstsq(x: Array, kept: list[int], pruned: list[int], ridge: float) -> tuple[Array, Array]:
    """(B, c) minimising ‖X_P - (X_S Bᵀ + 1cᵀ)‖² / n + ridge ‖B‖² by least squares on an augmented system; x [n, d]."""
    n, s = len(x), len(kept)
    design = np.hstack([x[:, kept] / np.sqrt(n), np.ones((n, 1)) / np.sqrt(n)])
    penalty = np.hstack([np.sqrt(ridge) * np.eye(s), np.zeros((s, 1))])
    target = np.vstack([x[:, pruned] / np.sqrt(n), np.zeros((s, len(pruned)))])
    solution = np.linalg.lstsq(np.vstack([design, penalty]), target, rcond=None)[0]
    return solution[:s].T, solution[s]


def sylvester_by_kronecker(gram_q: Array, gram_k: Array, rhs: Array, ridge: float) -> Array:
    """M of G_Q M G_K + ridge M = C from the (s² x s²) linear system of its entries."""
    s = len(gram_q)
    system = np.kron(gram_q, gram_k.T) + ridge * np.eye(s * s)
    return np.linalg.solve(system, rhs.reshape(-1)).reshape(s, s).astype(np.float64)


def logit_objective(q: Array, k: Array, kept: list[int], pruned: list[int], m: Array) -> float:
    """‖Q_P K_Pᵀ - Q_S M K_Sᵀ‖² over all pairs of tokens (Eq. 27 without the ridge); q, k [n, d]."""
    missing = q[:, pruned] @ k[:, pruned].T - q[:, kept] @ m @ k[:, kept].T
    return float((missing**2).sum())


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_obs(weight: Array, covariance: Array, ridge: float) -> tuple[list[int], list[float]]:
    """(order, costs): remove argmin ‖W_:j‖²/H_jj one at a time with full updates of W and H."""
    w, h = weight.copy(), np.linalg.inv(covariance + ridge * np.eye(len(covariance)))
    left, order, costs = list(range(len(covariance))), [], []
    while left:
        scores = [(w[:, j] ** 2).sum() / h[j, j] for j in left]
        j = left.pop(int(np.argmin(scores)))
        order.append(j)
        costs.append(float(min(scores)))
        w = w - np.outer(w[:, j], h[j]) / h[j, j]
        h = h - np.outer(h[:, j], h[j]) / h[j, j]
    return order, costs
