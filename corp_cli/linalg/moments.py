"""Mean and centred covariance of a stream of vectors, in one pass."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from corp_cli.linalg.rounding import centred, product

ROWS = 2048  # that a CPU takes together at most: for what is made of more, the system clears memory every time
PANELS = 4  # of the upper triangle: (4 + 1) / (2 * 4) = 62% of the full product; thinner panels multiply slower


@dataclass(frozen=True)
class Moments:
    """μ = E[x] and Σ = E[(x - μ)(x - μ)ᵀ] over `count` vectors; mean [d], covariance [d, d], float64."""

    count: int
    mean: Tensor
    covariance: Tensor

    def second_moment(self) -> Tensor:
        """E[x_j²] of every coordinate, [d]."""
        return self.covariance.diagonal() + self.mean.square()


def select_moments(moments: Moments, index: Tensor) -> Moments:
    """The moments of the coordinates `index`."""
    return Moments(moments.count, moments.mean[index], moments.covariance[index][:, index])


def transform_moments(moments: Moments, A: Tensor) -> Moments:
    """The moments of Ax."""
    return Moments(moments.count, A @ moments.mean, A @ moments.covariance @ A.T)


def plus_diagonal(square: Tensor, value: Tensor | float) -> Tensor:
    """`square` + `value` I, without an identity made for it: that takes longer than what it is for on a GPU."""
    raised = square.clone()
    raised.diagonal().add_(value)
    return raised


def energy(weight: Tensor, covariance: Tensor) -> Tensor:
    """tr(W Σ Wᵀ) = E‖W(x - μ)‖², a scalar."""
    return ((weight @ covariance) * weight).sum()


def relative(lost: Tensor, total: Tensor) -> float:
    """lost / total of two energies; none of nothing is lost."""
    return float(lost.clamp(min=0) / total) if total > 0 else 0.0


def add_upper_gram(total: Tensor, x: Tensor) -> None:
    """total += XᵀX on and above the diagonal blocks; x [n, d], total [d, d] float64.

    A full product would spend half of its time on values known by symmetry. Products are formed as `product` does.
    """
    d = x.shape[1]
    step = max(64, -(-d // PANELS))
    for start in range(0, d, step):
        some = product(x[:, start : start + step].T, x[:, start:])
        total[start : start + step, start:].add_(some.to(total.device))


def symmetric(square: Tensor) -> Tensor:
    """`square` [d, d] itself, its upper triangle now below too: panel by panel, since a second one may not fit."""
    step = max(64, -(-len(square) // PANELS))
    for start in range(0, len(square), step):
        rows = slice(start, start + step)
        square[rows, rows] = square[rows, rows].triu() + square[rows, rows].triu(1).T
        square[start + step :, rows] = square[rows, start + step :].T
    return square


class RunningMoments:
    """Moments of a stream, memory independent of its length: float64 sums of products in the stream's own dtype, or as
    `centred` has it.

    Every batch is centred on its own mean before its products are formed, and batches are joined by the pairwise
    update of Chan, Golub and LeVeque (1979): no cancellation where means are large beside deviations, and the
    result does not depend on how the stream was cut into batches (but for rounding). Weights are summed up where they
    are: a GPU need not be waited for.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self.count = 0
        self.weight = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Take in the rows of x [n, d], each counted `weights` [n] times (once where not given)."""
        added: Tensor | float = float(x.shape[0])
        if weights is None:
            mean, root = x.mean(0), None
        else:
            total = weights.sum()
            mean, added, root = weights @ x / total, total.to(self.weight), weights.sqrt()
        pieces = max(1, -(-len(x) // ROWS)) if x.device.type == "cpu" else 1
        roots = [None] * pieces if root is None else root.tensor_split(pieces)
        for rows, weighting in zip(x.tensor_split(pieces), roots, strict=True):
            add_upper_gram(self.scatter, centred(rows, mean, weighting))
        delta = mean.to(self.mean) - self.mean
        both = self.weight + added
        apart = delta * (self.weight * added / both).sqrt()
        self.scatter.addr_(apart, apart)
        self.mean += delta * (added / both)
        self.weight = both
        self.count += x.shape[0]

    def joined(self, other: RunningMoments) -> RunningMoments:
        """Those of both streams."""
        both = copy.copy(self)
        both.count, both.weight = self.count + other.count, self.weight + other.weight
        delta, share = other.mean - self.mean, other.weight / both.weight
        both.mean = self.mean + share * delta
        apart = delta * (self.weight * share).sqrt()
        both.scatter = (self.scatter + other.scatter).addr_(apart, apart)
        return both

    def result(self) -> Moments:
        """The moments of everything taken in so far."""
        return Moments(self.count, self.mean.clone(), symmetric(self.scatter / self.weight))

    def final(self) -> Moments:
        """The same in the place of the sums, which take in nothing more: there may be no room for both."""
        return Moments(self.count, self.mean, symmetric(self.scatter.div_(self.weight)))


def diagonal_blocks(covariance: Tensor, size: int) -> Tensor:
    """[n size, n size] → the n blocks of `size` along its diagonal, [n, size, size]: of one head each."""
    return torch.stack([covariance[i : i + size, i : i + size] for i in range(0, len(covariance), size)])
