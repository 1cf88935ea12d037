"""Closed forms on ill-conditioned statistics: finite, and never worse than plain removal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from corp_cli.linalg.logits import logit_error, missing_logits, split_factors
from corp_cli.linalg.lowrank import CUT, logit_factors, output_factors
from corp_cli.linalg.moments import diagonal_blocks
from corp_cli.linalg.obs import removal_order
from corp_cli.linalg.ridge import affine_error, affine_prediction, fold, mean_prediction, refit, solve_spd
from tests.linalg.test_linalg import correlated, moments_of, normal, split

KINDS = ["plain", "duplicated", "constant", "dead", "rank one", "mixed scales"]
kinds, seeds = st.sampled_from(KINDS), st.integers(0, 2**31)
tokens = st.sampled_from([1, 2, 5, 60])  # of 8 channels
scales = st.sampled_from([1e-20, 1e-5, 1.0, 1e5, 1e20])
ridges = st.sampled_from([0.0, 1e-12, 1e-3, 0.1, 1.0, 1e6])
D = 8
SLACK = 1e-6  # rounding, relative to what plain removal loses


def ill(kind: str, seed: int, n: int, scale: float) -> Tensor:
    x = correlated(seed, n, D)
    if kind == "duplicated":
        x[:, D // 2 :] = x[:, : D // 2]
    elif kind == "constant":
        x[:, ::2] = 3.0
    elif kind == "dead":
        x[:, ::2] = 0.0
    elif kind == "rank one":
        x = x[:, :1] * normal(seed + 7, 1, D)
    elif kind == "mixed scales":
        x = x * torch.logspace(-20, 20, D, dtype=torch.float64)
    return x * scale


@settings(deadline=None, max_examples=150)
@given(kind=kinds, seed=seeds, n=tokens, scale=scales, ridge=ridges, size=st.integers(1, D - 1))
def test_affine_repair_is_never_worse_than_the_mean(
    kind: str, seed: int, n: int, scale: float, ridge: float, size: int
) -> None:
    moments, weight = moments_of(ill(kind, seed, n, scale)), normal(seed + 3, 4, D)
    kept, pruned = split(D, size)
    affine = affine_prediction(moments, kept, pruned, ridge)
    by_mean = affine_error(weight, moments, kept, pruned, mean_prediction(moments, kept, pruned))
    found = affine_error(weight, moments, kept, pruned, affine)
    assert all(t.isfinite().all() for t in fold(weight, weight.new_zeros(4), kept, pruned, affine))
    assert found <= by_mean * (1 + SLACK) + 1e-9


@settings(deadline=None, max_examples=100)
@given(kind=kinds, seed=seeds, n=tokens, scale=scales, ridge=ridges)
def test_refit_is_never_worse_than_its_start(kind: str, seed: int, n: int, scale: float, ridge: float) -> None:
    x, weight = ill(kind, seed, n, scale), normal(seed + 3, 3, D)
    y = x @ normal(seed + 4, 3, D).T
    joint = moments_of(torch.cat([x, y], 1))
    new, bias = refit(weight, joint, ridge)
    assert new.isfinite().all()
    assert bias.isfinite().all()

    def error(w: Tensor) -> float:
        residual = y - y.mean(0) - (x - x.mean(0)) @ w.T
        return float(residual.square().sum())

    assert error(new) <= error(weight) * (1 + SLACK) + 1e-9 * float(y.square().sum())


@settings(deadline=None, max_examples=100)
@given(kind=kinds, other=kinds, seed=seeds, n=tokens, scale=scales, ridge=ridges, size=st.integers(1, D - 1))
@example(kind="mixed scales", other="rank one", seed=617, n=2, scale=1e-20, ridge=0.0, size=6)
def test_logit_repairs_are_never_worse_than_plain_removal(
    kind: str, other: str, seed: int, n: int, scale: float, ridge: float, size: int
) -> None:
    q, k = ill(kind, seed, n, scale), ill(other, seed + 1, n, 1 / scale)
    gram_q, gram_k = (t.T @ t / n for t in (q, k))
    gram_q, gram_k = gram_q[None], gram_k[None]
    kept, pruned = split(D, size)
    selection = torch.eye(D, dtype=torch.float64)[kept][None]
    plain = logit_error(gram_q, gram_k, selection.mT @ selection)
    M = missing_logits(gram_q, gram_k, kept[None], pruned[None], ridge)
    U, V = split_factors(torch.eye(size, dtype=torch.float64) + M)
    A, B, _ = logit_factors(gram_q, gram_k)
    sylvester = selection.mT @ U @ V.mT @ selection
    lowrank = A[:, :size].mT @ B[:, :size]
    assert sylvester.isfinite().all()
    assert lowrank.isfinite().all()
    assert logit_error(gram_q, gram_k, sylvester) <= plain * (1 + SLACK) + 1e-9
    # directions below CUT count as none, so what the others make of them is lost: tr(P G_Q P G_K) <= CUT λ tr(G_K)
    parts = [torch.linalg.eigvalsh(gram)[0] for gram in (gram_q, gram_k)]
    unseen = CUT * sum(float(a.max() * b.sum()) for a, b in (parts, parts[::-1])) / float((gram_q * gram_k).sum())
    most = (plain**0.5 + unseen**0.5) ** 2
    assert logit_error(gram_q, gram_k, lowrank) <= most * (1 + SLACK) + 1e-9


@settings(deadline=None, max_examples=60)
@given(kind=kinds, seed=seeds, n=tokens, scale=scales, size=st.integers(1, D - 1))
def test_low_rank_outputs_are_never_worse_than_dropping_dimensions(
    kind: str, seed: int, n: int, scale: float, size: int
) -> None:
    covariance, weight = moments_of(ill(kind, seed, n, scale)).covariance, normal(seed + 3, 1, 5, D)
    E, Dec, _ = output_factors(diagonal_blocks(covariance, D), weight)
    through = Dec[0][:, :size] @ E[0][:size]
    kept, _ = split(D, size)
    selection = torch.eye(D, dtype=torch.float64)[kept]

    def error(map_: Tensor) -> float:
        lost = weight[0] - weight[0] @ map_
        return float(((lost @ covariance) * lost).sum())

    total = error(torch.zeros(D, D, dtype=torch.float64))
    assert through.isfinite().all()
    assert error(through) <= error(selection.T @ selection) * (1 + SLACK) + 1e-9 * total


@settings(deadline=None, max_examples=100)
@example(kind="rank one", seed=733161949, n=60, scale=1e-5, ridge=0.0)
@given(kind=kinds, seed=seeds, n=tokens, scale=scales, ridge=ridges)
def test_obs_orders_every_channel_at_a_finite_cost(kind: str, seed: int, n: int, scale: float, ridge: float) -> None:
    removal = removal_order(normal(seed + 3, 4, D), moments_of(ill(kind, seed, n, scale)), ridge)
    assert removal.order.sort().values.tolist() == list(range(D))
    assert removal.error.isfinite().all()


@pytest.mark.parametrize("seed", range(20))
def test_obs_removes_one_of_each_pair_before_any_unique_channel(seed: int) -> None:
    x = correlated(seed, 200, 6)
    first = removal_order(normal(seed + 3, 4, 8), moments_of(torch.cat([x, x[:, :2]], 1)), 1e-9).order[:2]
    assert {int(j) % 6 for j in first} == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_dependent_channels_without_a_ridge_are_solved_by_the_least_norm(seed: int) -> None:
    """Cholesky may pass over a pivot that is rounding alone; weights of 1e7 that cancel are lost in float32."""
    moments = moments_of(normal(seed, 60, 3) @ normal(seed + 1, 3, D))
    b = moments.covariance[:, :2]
    torch.testing.assert_close(
        solve_spd(moments.covariance, b),
        torch.linalg.pinv(moments.covariance, hermitian=True, rtol=1e-13) @ b,
        rtol=1e-4,
        atol=1e-4,
    )
