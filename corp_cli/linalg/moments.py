"""Mean and centred covariance of a stream of vectors, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TRIANGLE_BLOCKS = 8  # row blocks of the upper triangle: (8 + 1) / (2 * 8) = 56% of the full product


@dataclass(frozen=True)
class Moments:
    """μ = E[x] and Σ = E[(x - μ)(x - μ)ᵀ] over `count` vectors; mean [d], covariance [d, d], float64."""

    count: int
    mean: Tensor
    covariance: Tensor

    def second_moment(self) -> Tensor:
        """E[x_j²] of every coordinate, [d]."""
        return self.covariance.diagonal() + self.mean.square()


def gram(x: Tensor) -> Tensor:
    """XᵀX for x [n, d], computing only row blocks of the upper triangle; [d, d], dtype of x.

    A dense product would spend half of its time on values known by symmetry.
    """
    d = x.shape[1]
    step = max(64, -(-d // TRIANGLE_BLOCKS))
    product = x.new_empty(d, d)
    for start in range(0, d, step):
        stop = min(start + step, d)
        torch.mm(x[:, start:stop].T, x[:, start:], out=product[start:stop, start:])
        product[stop:, start:stop] = product[start:stop, stop:].T
    return product


class RunningMoments:
    """Moments of a stream, memory independent of its length: float64 sums of products in the stream's own dtype.

    Every batch is centred on its own mean before its products are formed, and batches are joined by the pairwise
    update of Chan, Golub and LeVeque (1979): no cancellation where means are large beside deviations, and the
    result does not depend on how the stream was cut into batches (but for rounding).
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Take in the rows of x [n, d]."""
        n = x.shape[0]
        mean = x.mean(0, dtype=torch.float64)
        products = gram(x - mean.to(x.dtype))
        delta = mean.to(self.mean) - self.mean
        total = self.count + n
        self.scatter.add_(products.to(self.scatter.device))
        self.scatter.addr_(delta, delta, alpha=self.count * n / total)
        self.mean.add_(delta, alpha=n / total)
        self.count = total

    def result(self) -> Moments:
        """The moments of everything taken in so far."""
        return Moments(self.count, self.mean.clone(), self.scatter / self.count)
