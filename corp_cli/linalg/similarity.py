"""How alike the features of two models are, and how well the features of one tell classes apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEIGHBOURS, TEMPERATURE = 20, 0.07  # as in DINO (Caron et al., 2021)
ROWS = 1024  # of similarities that are held at a time


def linear_cka(x: Tensor, y: Tensor) -> float | None:
    """‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centred X [n, d], Y [n, e] (Kornblith et al., 2019); None where one does not vary."""
    x, y = (t.double() - t.double().mean(0) for t in (x, y))
    if len(x) <= x.shape[1]:  # the same from [n, n] products, which are then the smaller ones
        of_x, of_y = x @ x.T, y @ y.T
        shared, scale = (of_x * of_y).sum(), of_x.norm() * of_y.norm()
    else:
        shared, scale = (x.T @ y).square().sum(), (x.T @ x).norm() * (y.T @ y).norm()
    return min(1.0, float(shared / scale)) if scale > 0 else None


def knn_hits(features: Tensor, labels: Tensor, neighbours: int = NEIGHBOURS) -> int:
    """How many of features [n, d] have the class that argmax_c Σ_{j: c_j = c} exp(cos(x, x_j) / 0.07) gives them.

    The sum is over the nearest `neighbours` of the other images (leave one out); labels [n] are from 0 up.
    """
    unit, hits = F.normalize(features.float(), dim=-1), 0
    classes, neighbours = int(labels.max()) + 1, min(neighbours, len(labels) - 1)
    for start in range(0, len(unit), ROWS):
        rows = torch.arange(start, min(start + ROWS, len(unit)))
        similar = unit[rows] @ unit.T
        similar[torch.arange(len(rows)), rows] = -torch.inf
        nearest = similar.topk(neighbours, dim=1)
        votes = torch.zeros(len(rows), classes).scatter_add_(
            1, labels[nearest.indices], ((nearest.values - 1) / TEMPERATURE).exp()
        )
        hits += int((votes.argmax(1) == labels[rows]).sum())
    return hits
