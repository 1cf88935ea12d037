"""OBS against the plain loop, and against what its quotients promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corp_cli.linalg import obs
from corp_cli.linalg.lowrank import logit_factors, output_factors, roots
from corp_cli.linalg.moments import RunningMoments
from corp_cli.linalg.ridge import affine_error, affine_prediction
from tests.linalg.test_linalg import correlated, moments_of, normal
from tests.support import reference

seeds = st.integers(0, 2**31)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, d=st.integers(2, 12), lazy=st.integers(1, 5), ridge_lambda=st.sampled_from([1e-3, 1e-1]))
def test_lazy_updates_give_the_order_and_costs_of_the_plain_loop(
    seed: int, d: int, lazy: int, ridge_lambda: float
) -> None:
    x, weight = correlated(seed, 60, d), normal(seed + 5, 3, d)
    moments = moments_of(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obs, "GROUP", lazy)
        patch.setattr(obs, "CANDIDATES", d)
        found = obs.removal_order(weight, moments, ridge_lambda)
    ridge = ridge_lambda * float(moments.covariance.diagonal().mean())
    order, costs = reference.plain_obs(weight.numpy(), moments.covariance.numpy(), ridge)
    assert found.order.tolist() == order
    np.testing.assert_allclose(found.error.numpy(), np.cumsum(costs), rtol=1e-6, atol=1e-9)


def test_several_layers_are_gone_through_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(obs, "GROUP", 3)
    monkeypatch.setattr(obs, "CANDIDATES", 6)
    layers = [(normal(seed, 4, d), moments_of(correlated(seed + 9, 80, d))) for seed, d in ((1, 12), (2, 12), (3, 7))]
    removals = [None, 5, 7]
    found = obs.removal_orders(layers, 1e-2, removals)
    for layer, count, together in zip(layers, removals, found, strict=True):
        alone = obs.removal_order(*layer, 1e-2, count)
        torch.testing.assert_close((together.order, together.error), (alone.order, alone.error))


def test_groups_of_several_layers_are_those_of_each() -> None:
    grams = [(lambda t: t.mT @ t)(normal(seed, 2, 40, 20)) + torch.eye(20).double() for seed in range(3)]
    chosen, costs = obs.cheapest_group(torch.stack(grams))
    for i, gram in enumerate(grams):
        torch.testing.assert_close((chosen[i], costs[i]), tuple(part[0] for part in obs.cheapest_group(gram[None])))
    assert len(chosen[0].unique()) == 20


def test_error_is_that_of_the_ridge_solution_on_what_is_kept() -> None:
    x, weight = correlated(1, 200, 8), normal(2, 4, 8)
    moments = moments_of(x)
    removal = obs.removal_order(weight, moments, 1e-9)
    kept = removal.order[3:].sort().values
    pruned = removal.order[:3]
    affine = affine_prediction(moments, kept, pruned, 1e-9)
    total = float(((weight @ moments.covariance) * weight).sum())
    assert affine_error(weight, moments, kept, pruned, affine) * total == pytest.approx(
        float(removal.error[2]), rel=1e-4
    )


def test_the_first_removal_is_the_cheapest_of_all() -> None:
    x, weight = correlated(3, 100, 7), normal(4, 3, 7)
    moments = moments_of(x)
    first = int(obs.removal_order(weight, moments, 1e-6).order[0])

    def cost(j: int) -> float:
        kept = torch.tensor([i for i in range(7) if i != j])
        affine = affine_prediction(moments, kept, torch.tensor([j]), 1e-6)
        return affine_error(weight, moments, kept, torch.tensor([j]), affine)

    assert min(range(7), key=cost) == first


@pytest.mark.parametrize("kind", ["dead", "duplicated", "all dead"])
def test_dead_and_duplicated_channels_go_first_at_no_cost(kind: str) -> None:
    x, weight = correlated(6, 100, 6), normal(7, 3, 6)
    x[:, 2] = 0.0 if kind != "duplicated" else x[:, 4]
    x = x * 0 if kind == "all dead" else x
    removal = obs.removal_order(weight, moments_of(x), 0.0)
    assert removal.error.isfinite().all()
    assert sorted(removal.order.tolist()) == list(range(6))
    if kind != "all dead":
        assert int(removal.order[0]) in (2, 4)
        assert float(removal.error[0]) < 1e-6 * float(removal.error[-1])


def test_weights_count_rows_several_times() -> None:
    x = correlated(8, 10, 4)
    times = torch.tensor([1, 3, 1, 1, 2, 1, 1, 1, 5, 1])
    weighted = RunningMoments(4, torch.device("cpu"))
    weighted.add(x[:4], times[:4].double())
    weighted.add(x[4:], times[4:].double())
    repeated = moments_of(x.repeat_interleave(times, 0))
    torch.testing.assert_close(weighted.result().mean, repeated.mean)
    torch.testing.assert_close(weighted.result().covariance, repeated.covariance)


# --- low rank -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(seed=seeds, d=st.integers(1, 6))
def test_roots_multiply_back(seed: int, d: int) -> None:
    gram = correlated(seed, 30, d).T @ correlated(seed, 30, d)
    root, inverse = roots(gram)
    torch.testing.assert_close(root @ root, gram, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(root @ inverse, torch.eye(d, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def logit_loss(q: torch.Tensor, k: torch.Tensor, bilinear: torch.Tensor) -> float:
    return float((q @ (torch.eye(q.shape[1], dtype=q.dtype) - bilinear) @ k.T).square().sum())


@settings(deadline=None, max_examples=30)
@given(seed=seeds, d=st.integers(2, 6), rank=st.integers(1, 5))
def test_logit_factors_leave_the_tail_of_the_spectrum_and_no_map_of_that_rank_less(
    seed: int, d: int, rank: int
) -> None:
    rank = min(rank, d)
    q, k = correlated(seed, 25, d), correlated(seed + 7, 25, d)
    A, B, sigma = (t[0] for t in logit_factors((q.T @ q)[None], (k.T @ k)[None]))
    best = logit_loss(q, k, A[:rank].T @ B[:rank])
    total = logit_loss(q, k, torch.zeros(d, d, dtype=torch.float64))
    assert best == pytest.approx(float(sigma[rank:].square().sum()), rel=1e-5, abs=1e-8 * total)
    others = (normal(seed + i, d, rank) @ normal(seed + i + 50, rank, d) for i in range(3))
    nearby = ((A[:rank] + 0.01 * normal(seed + i, rank, d)).T @ B[:rank] for i in range(3))
    assert all(best <= logit_loss(q, k, m) * (1 + 1e-9) + 1e-9 * total for m in (*others, *nearby))


def test_output_factors_leave_the_tail_of_the_spectrum() -> None:
    o = correlated(2, 50, 5)
    o = o - o.mean(0)
    weight, cov = normal(3, 9, 5), o.T @ o / 50
    E, D, sigma = (t[0] for t in output_factors(cov[None], weight[None]))
    for rank in range(1, 6):
        lost = ((o - o @ E[:rank].T @ D[:, :rank].T) @ weight.T).square().sum(1).mean()
        assert float(lost) == pytest.approx(float(sigma[rank:].square().sum()), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(E @ cov @ E.T, torch.eye(5, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=seeds, d=st.integers(6, 40), candidates=st.integers(1, 12), group=st.integers(1, 6), part=st.floats(0, 1))
def test_groups_among_candidates_cost_what_they_say_and_hardly_more(
    seed: int, d: int, candidates: int, group: int, part: float
) -> None:
    x, weight = correlated(seed, 200, d), normal(seed + 5, 3, d)
    moments, removals = moments_of(x), int(part * d)
    plain = obs.removal_order(weight, moments, 1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(obs, "GROUP", group)
        patch.setattr(obs, "CANDIDATES", candidates)
        found = obs.removal_order(weight, moments, 1e-2, removals)
    assert len(set(found.order.tolist())) == removals
    if removals:
        ridge = 1e-2 * moments.covariance.diagonal().mean()
        left = sorted(set(range(d)) - set(found.order.tolist()))
        covariance = moments.covariance + ridge * torch.eye(d).double()
        error = weight @ covariance @ weight.T
        if left:
            cross = (weight @ covariance)[:, left]
            error = error - cross @ torch.linalg.solve(covariance[left][:, left], cross.T)
        assert float(found.error[-1]) == pytest.approx(float(error.trace()), rel=1e-6)
        assert float(found.error[-1]) <= 1.25 * float(plain.error[removals - 1]) + 1e-9
