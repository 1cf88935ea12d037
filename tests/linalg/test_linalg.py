"""linalg against slow float64 oracles, and properties that hold for every input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corp_cli.linalg.logits import logit_error, missing_logits, split_factors, sylvester, take
from corp_cli.linalg.moments import ROWS, Moments, RunningMoments, add_upper_gram, symmetric
from corp_cli.linalg.ridge import affine_error, affine_prediction, fold, mean_prediction, no_prediction, solve_spd
from tests.support import reference

dims = st.integers(2, 9)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(seed: int, n: int, d: int) -> Tensor:
    """Vectors with means and correlations, as activations have."""
    return normal(seed, n, d) @ normal(seed + 1, d, d) + 3 * normal(seed + 2, d)


def moments_of(x: Tensor, pieces: int = 1) -> Moments:
    running = RunningMoments(x.shape[1], torch.device("cpu"))
    for piece in x.tensor_split(pieces):
        if len(piece):
            running.add(piece)
    return running.result()


def split(d: int, kept: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(d, generator=torch.Generator().manual_seed(d * 31 + kept))
    return order[:kept].sort().values, order[kept:].sort().values


# --- moments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 5, 64, 65, 200])
def test_upper_gram_holds_the_full_product(d: int) -> None:
    x, total = normal(d, 7, d), torch.zeros(d, d, dtype=torch.float64)
    add_upper_gram(total, x)
    torch.testing.assert_close(symmetric(total), x.T @ x, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(seed=seeds, n=st.integers(1, 40), d=dims, pieces=st.integers(1, 12))
def test_moments_do_not_depend_on_batches(seed: int, n: int, d: int, pieces: int) -> None:
    x = correlated(seed, n, d)
    found = moments_of(x, pieces)
    assert found.count == n
    torch.testing.assert_close(found.mean, x.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance, torch.cov(x.T, correction=0).reshape(d, d), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.second_moment(), x.square().mean(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [ROWS, ROWS + 1, 3 * ROWS + 160])
def test_moments_of_batches_that_are_taken_in_pieces(n: int, weighted: bool) -> None:
    x, weights = correlated(n, n, 3), normal(n + 3, n).exp() if weighted else torch.ones(n, dtype=torch.float64)
    running = RunningMoments(3, torch.device("cpu"))
    running.add(x, weights if weighted else None)
    found = running.result()
    torch.testing.assert_close(found.mean, weights @ x / weights.sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.covariance, torch.cov(x.T, correction=0, aweights=weights), rtol=1e-9, atol=1e-9)


def test_moments_of_float32_keep_their_digits_under_a_large_mean() -> None:
    """Raw second moments in float32 would lose the unit variance beside a mean of 1e4."""
    x = (normal(0, 4000, 3) + 1e4).float()
    found = moments_of(x, 5)
    torch.testing.assert_close(found.covariance, torch.cov(x.double().T, correction=0), rtol=1e-3, atol=1e-3)


# --- ridge ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(seed=seeds, d=dims, share=st.floats(0.1, 0.9), ridge_lambda=st.sampled_from([1e-3, 1e-1, 1.0]))
def test_affine_prediction_is_the_ridge_solution(seed: int, d: int, share: float, ridge_lambda: float) -> None:
    kept, pruned = split(d, max(1, min(d - 1, round(share * d))))
    x = correlated(seed, 50, d)
    moments = moments_of(x, 3)
    found = affine_prediction(moments, kept, pruned, ridge_lambda)
    ridge = ridge_lambda * float(x.var(0, correction=0)[kept].mean())
    B, c = reference.affine_by_lstsq(x.numpy(), kept.tolist(), pruned.tolist(), ridge)
    np.testing.assert_allclose(found.B.numpy(), B, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.c.numpy(), c, rtol=1e-6, atol=1e-6)


def test_ridge_is_relative() -> None:
    """Scaling all activations changes neither B nor what is folded."""
    x = correlated(1, 60, 6)
    kept, pruned = split(6, 3)
    small = affine_prediction(moments_of(x), kept, pruned, 0.1)
    large = affine_prediction(moments_of(1000 * x), kept, pruned, 0.1)
    torch.testing.assert_close(small.B, large.B)
    torch.testing.assert_close(1000 * small.c, large.c)


def test_fold_reproduces_a_layer_whose_pruned_inputs_are_affine_in_the_kept() -> None:
    kept, pruned = split(8, 5)
    x = normal(3, 100, 8)
    x[:, pruned] = x[:, kept] @ normal(4, 5, 3) + normal(5, 3)
    weight, bias = normal(6, 4, 8), normal(7, 4)
    moments = moments_of(x)
    new_weight, new_bias = fold(weight, bias, kept, pruned, affine_prediction(moments, kept, pruned, 0.0))
    torch.testing.assert_close(x[:, kept] @ new_weight.T + new_bias, x @ weight.T + bias, rtol=1e-8, atol=1e-8)


@settings(deadline=None)
@given(seed=seeds, d=dims, ridge_lambda=st.sampled_from([0.0, 1e-3, 1e-1]))
def test_affine_error_is_the_measured_one_and_falls_with_every_step(seed: int, d: int, ridge_lambda: float) -> None:
    kept, pruned = split(d, d // 2)
    x, weight, bias = correlated(seed, 80, d), normal(seed + 9, 4, d), normal(seed + 10, 4)
    moments = moments_of(x)
    errors = []
    for affine in (
        no_prediction(moments, kept, pruned),
        mean_prediction(moments, kept, pruned),
        affine_prediction(moments, kept, pruned, ridge_lambda),
    ):
        new_weight, new_bias = fold(weight, bias, kept, pruned, affine)
        lost = (x @ weight.T + bias - x[:, kept] @ new_weight.T - new_bias).square().sum(1).mean()
        energy = ((x - x.mean(0)) @ weight.T).square().sum(1).mean()
        errors.append(affine_error(weight, moments, kept, pruned, affine))
        assert errors[-1] == pytest.approx(float(lost / energy), rel=1e-6, abs=1e-9)
    if ridge_lambda == 0:
        assert errors[2] <= errors[1] + 1e-9


@pytest.mark.parametrize("kind", ["dead", "duplicated"])
def test_singular_covariance_is_solved_without_ridge(kind: str) -> None:
    x = correlated(11, 100, 6)
    x[:, 1] = 0.0 if kind == "dead" else x[:, 0]
    kept, pruned = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])
    found = affine_prediction(moments_of(x), kept, pruned, 0.0)
    B, c = reference.affine_by_lstsq(x[:, [0, 2, 3, 4, 5]].numpy(), [0, 1], [2, 3, 4], 0.0)
    predicted = x[:, kept] @ found.B.T + found.c
    np.testing.assert_allclose(predicted.numpy(), x[:, [0, 2]].numpy() @ B.T + c, rtol=1e-6, atol=1e-6)


def test_solve_spd_takes_the_smallest_solution_of_a_singular_system() -> None:
    a = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(
        solve_spd(a, torch.tensor([[4.0], [0.0]]).double()), torch.tensor([[2.0], [0.0]]).double()
    )


# --- logits ---------------------------------------------------------------------------------------------------


def grams(seed: int, heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = torch.stack([correlated(seed + 10 * h, n, d) for h in range(heads)])
    k = torch.stack([correlated(seed + 10 * h + 5, n, d) for h in range(heads)])
    return q, k, q.mT @ q / n, k.mT @ k / n


@settings(deadline=None)
@given(seed=seeds, s=st.integers(1, 5), ridge_lambda=st.sampled_from([1e-3, 1e-1, 1.0]))
def test_sylvester_solves_its_equation(seed: int, s: int, ridge_lambda: float) -> None:
    _, _, gram_q, gram_k = grams(seed, 2, 30, s)
    rhs = normal(seed + 3, 2, s, s)
    found = sylvester(gram_q, gram_k, rhs, ridge_lambda)
    for h in range(2):
        ridge = ridge_lambda * float(gram_q[h].trace() * gram_k[h].trace()) / s**2
        expected = reference.sylvester_by_kronecker(gram_q[h].numpy(), gram_k[h].numpy(), rhs[h].numpy(), ridge)
        np.testing.assert_allclose(found[h].numpy(), expected, rtol=1e-6, atol=1e-8)


def test_missing_logits_minimise_the_logit_error() -> None:
    """Without ridge no other M does better on the calibration tokens themselves."""
    q, k, gram_q, gram_k = grams(5, 1, 40, 6)
    kept, pruned = split(6, 3)
    m = missing_logits(gram_q, gram_k, kept[None], pruned[None], 0.0)[0]
    args = q[0].numpy(), k[0].numpy(), kept.tolist(), pruned.tolist()
    best = reference.logit_objective(*args, m.numpy())
    for seed in range(5):
        assert best <= reference.logit_objective(*args, (m + 1e-2 * normal(seed, 3, 3)).numpy())
    assert not torch.allclose(m, m.T)  # M is not symmetric, and must not be made so


def test_missing_logits_with_a_silent_head() -> None:
    zero = torch.zeros(1, 4, 4, dtype=torch.float64)
    kept, pruned = torch.tensor([[0, 2]]), torch.tensor([[1, 3]])
    assert torch.equal(missing_logits(zero, zero, kept, pruned, 1e-3), torch.zeros(1, 2, 2, dtype=torch.float64))


@settings(deadline=None)
@given(seed=seeds, s=st.integers(1, 6))
def test_split_factors_multiply_back(seed: int, s: int) -> None:
    bilinear = normal(seed, 2, s, s)
    U, V = split_factors(bilinear)
    torch.testing.assert_close(U @ V.mT, bilinear, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(U.norm(dim=1), V.norm(dim=1))  # the singular values are shared evenly


def test_logit_error_is_the_measured_one() -> None:
    q, k, gram_q, gram_k = grams(9, 2, 30, 5)
    kept = torch.tensor([[0, 1, 4], [1, 2, 3]])
    bilinear = normal(4, 2, 3, 3)
    lost = total = 0.0
    for h in range(2):
        full = q[h] @ k[h].T
        lost += float((full - q[h][:, kept[h]] @ bilinear[h] @ k[h][:, kept[h]].T).square().sum())
        total += float(full.square().sum())
    full = torch.zeros(2, 5, 5, dtype=torch.float64)
    for h in range(2):
        full[h][kept[h][:, None], kept[h]] = bilinear[h]
    assert logit_error(gram_q, gram_k, full) == pytest.approx(lost / total, rel=1e-9)


def test_take_picks_rows_and_columns_per_head() -> None:
    matrices = torch.arange(18.0).reshape(2, 3, 3)
    found = take(matrices, torch.tensor([[0, 2], [1, 2]]), torch.tensor([[1], [0]]))
    assert found.tolist() == [[[1.0], [7.0]], [[12.0], [15.0]]]
