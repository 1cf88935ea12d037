"""Ranks, correlations and entropies against their definitions, written out slowly."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import Tensor

from corp_cli.linalg.agreement import overlap, spearman
from corp_cli.linalg.spectrum import (
    attention_entropy,
    components_for,
    effective_rank,
    entropy_rank,
    largest_correlations,
    spectrum,
)

SEEDS = st.integers(0, 10**6)


def samples(seed: int, d: int = 6, n: int = 40) -> Tensor:
    """Channels that are correlated, of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n, d, generator=generator, dtype=torch.float64) @ torch.randn(
        d, d, generator=generator, dtype=torch.float64
    )
    return mixed * torch.logspace(-1, 1, d, dtype=torch.float64)


@given(SEEDS)
def test_ranks_are_those_of_the_singular_values(seed: int) -> None:
    x = samples(seed)
    variances = np.linalg.svd((x - x.mean(0)).numpy(), compute_uv=False) ** 2 / len(x)
    share = variances / variances.sum()
    found = spectrum(x.T.cov(correction=0))
    torch.testing.assert_close(found, torch.from_numpy(variances))
    covariance = x.T.cov(correction=0)
    participation = covariance.trace() ** 2 / (covariance @ covariance).trace()
    torch.testing.assert_close(effective_rank(found), participation)
    assert math.isclose(float(entropy_rank(found)), math.exp(-sum(p * math.log(p) for p in share)), rel_tol=1e-9)
    needed = next(k for k in range(1, len(share) + 1) if share[:k].sum() >= 0.9)
    assert int(components_for(found, 0.9)) == needed
    assert 1 <= effective_rank(found) <= entropy_rank(found) + 1e-9 <= len(share) + 2e-9


def test_equal_directions_count_in_full_and_nothing_counts_for_nothing() -> None:
    three = torch.diag(torch.tensor([0.0, 2.0, 2.0, 0.0, 2.0], dtype=torch.float64))
    values = spectrum(torch.stack([three, torch.zeros_like(three)]))
    torch.testing.assert_close(effective_rank(values), torch.tensor([3.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(entropy_rank(values), torch.tensor([3.0, 0.0], dtype=torch.float64))
    assert components_for(values, 0.95).tolist() == [3, 0]


@given(SEEDS)
def test_largest_correlations_are_numpys(seed: int) -> None:
    x = samples(seed)
    x[:, 2] = -3 * x[:, 4] + 1
    correlation = np.abs(np.corrcoef(x.numpy().T)) - np.eye(x.shape[1])
    found = largest_correlations(x.T.cov(correction=0))
    np.testing.assert_allclose(found, correlation.max(0), rtol=1e-9)
    np.testing.assert_allclose(found[[2, 4]], 1)


def test_a_constant_channel_is_like_no_other() -> None:
    covariance = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.0, 1.0]], dtype=torch.float64)
    assert largest_correlations(covariance).tolist() == [0.5, 0.0, 0.5]


def test_attention_entropy() -> None:
    maps = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(attention_entropy(maps), torch.tensor([math.log(4), 0.0, math.log(2)]))


@given(SEEDS)
def test_rankings_agree_as_scipy_says(seed: int) -> None:
    a, b = np.random.default_rng(seed).integers(0, 5, (2, 8)).astype(float)  # with ties
    a[0], b[0] = 9, 9  # not all alike
    found = spearman(torch.from_numpy(a), torch.from_numpy(b))
    assert math.isclose(float(found), spearmanr(a, b).statistic, rel_tol=1e-9, abs_tol=1e-12)


def test_rankings_that_say_nothing_agree_by_nothing() -> None:
    scores = torch.arange(4.0).double()
    assert spearman(scores, torch.ones_like(scores)) == 0
    assert math.isclose(float(spearman(scores, -scores)), -1)


def test_overlap_counts_what_is_in_both() -> None:
    a, b = torch.tensor([[0, 2, 5], [1, 2, 3]]), torch.tensor([[5, 0, 7], [4, 5, 6]])
    torch.testing.assert_close(overlap(a, b), torch.tensor([2 / 3, 0.0], dtype=torch.float64))
