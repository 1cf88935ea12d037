"""Reduced-rank regression of all heads: against its closed form, least squares, and what no sweep may make worse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corp_cli.linalg.lowrank import roots
from corp_cli.linalg.moments import Moments, RunningMoments
from corp_cli.linalg.reduced_rank import HeadMaps, reduced_rank, sweep
from tests.linalg.test_linalg import normal

HEADS, WIDTH, OUTPUTS, RANK = 3, 5, 7, 2
RIDGES = (0.01, 0.1, 1.0)


def moments_of(u: Tensor, y: Tensor) -> Moments:
    running = RunningMoments(u.shape[1] + y.shape[1], u.device)
    running.add(torch.cat([u, y], 1))
    return running.result()


def heads_of(seed: int, heads: int = HEADS, rank: int = RANK) -> HeadMaps:
    return HeadMaps(normal(seed, heads, rank, WIDTH), normal(seed + 1, heads, OUTPUTS, rank))


def sampled(seed: int, count: int, noise: float, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    """Inputs that correlate between heads, and outputs that maps of full rank nearly make of them."""
    u = normal(seed, count, heads * WIDTH) @ normal(1, heads * WIDTH, heads * WIDTH) + 1
    return u, u @ normal(2, heads * WIDTH, OUTPUTS) + noise * normal(seed + 9, count, OUTPUTS) - 3


def residual(heads: HeadMaps, u: Tensor, y: Tensor) -> float:
    left = y - u @ heads.maps().T
    return float((left - left.mean(0)).square().sum() / (y - y.mean(0)).square().sum())


def test_one_head_is_izenmans_closed_form() -> None:
    u, y = sampled(0, 200, 1.0, heads=1)
    joint = moments_of(u, y)
    found = sweep(heads_of(3, heads=1), torch.zeros(1, OUTPUTS, WIDTH).double(), joint, 0.0)
    u, y = u - u.mean(0), y - y.mean(0)
    least = torch.linalg.lstsq(u, y).solution.T
    _, _, Vt = torch.linalg.svd((least @ u.T @ u @ least.T) / len(u))
    expected = Vt[:RANK].T @ Vt[:RANK] @ least
    torch.testing.assert_close(found.maps(), expected, rtol=1e-8, atol=1e-8)


def test_heads_of_full_rank_become_least_squares() -> None:
    u, y = normal(0, 400, HEADS * WIDTH) + normal(6, 400, 1), normal(1, 400, OUTPUTS)
    heads, joint = heads_of(3, rank=WIDTH), moments_of(u, y)
    for _ in range(100):
        heads = sweep(heads, torch.zeros(HEADS, OUTPUTS, WIDTH).double(), joint, 0.0)
    expected = torch.linalg.lstsq(u - u.mean(0), y - y.mean(0)).solution.T
    torch.testing.assert_close(heads.maps(), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(heads.bias(joint), (y - u @ expected.T).mean(0), rtol=1e-6, atol=1e-8)


def test_the_ridge_is_that_of_a_dense_solve_towards_the_maps_before() -> None:
    u, y = sampled(0, 60, 1.0, heads=1)
    towards = normal(8, 1, OUTPUTS, WIDTH)
    found = sweep(heads_of(3, heads=1, rank=WIDTH), towards, moments_of(u, y), 0.3)
    u, y = u - u.mean(0), y - y.mean(0)
    ridge = 0.3 * u.square().sum() / WIDTH
    rows = torch.cat([u, ridge.sqrt() * torch.eye(WIDTH).double()])
    expected = torch.linalg.lstsq(rows, torch.cat([y, ridge.sqrt() * towards[0].T])).solution.T
    torch.testing.assert_close(found.maps(), expected, rtol=1e-8, atol=1e-8)


def test_no_other_map_of_that_rank_comes_nearer() -> None:
    u, y = sampled(0, 200, 1.0, heads=1)
    joint = moments_of(u, y)
    best = sweep(heads_of(3, heads=1), torch.zeros(1, OUTPUTS, WIDTH).double(), joint, 0.0)
    for seed in range(50):
        encode, decode = (part + 0.05 * normal(seed, *part.shape) for part in (best.encode, best.decode))
        assert residual(HeadMaps(encode, decode), u, y) >= residual(best, u, y) - 1e-12


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**31), ridge=st.sampled_from((0.0, *RIDGES)))
def test_a_sweep_never_raises_what_it_minimises(seed: int, ridge: float) -> None:
    u, y = sampled(seed, 100, 1.0)
    joint, towards = moments_of(u, y), normal(seed + 5, HEADS, OUTPUTS, WIDTH)

    def objective(heads: HeadMaps) -> float:
        error = residual(heads, u, y) * float(joint.covariance.diagonal()[HEADS * WIDTH :].sum())
        for h in range(HEADS):
            gram = joint.covariance[h * WIDTH : (h + 1) * WIDTH, h * WIDTH : (h + 1) * WIDTH]
            away = heads.decode[h] @ heads.encode[h] - towards[h]
            error += ridge * float(gram.diagonal().mean() * away.square().sum())
        return error

    heads = heads_of(seed + 3)
    for _ in range(3):
        swept = sweep(heads, towards, joint, ridge)
        assert objective(swept) <= objective(heads) * (1 + 1e-9)
        heads = swept


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), count=st.integers(3, 100))
def test_no_sweep_is_taken_that_other_images_do_not_confirm(seed: int, count: int) -> None:
    fitted, others = (moments_of(*sampled(seed + i, n, 5.0)) for i, n in enumerate((count, 50)))
    towards = normal(seed + 5, HEADS, OUTPUTS, WIDTH)
    start = heads_of(seed + 3)
    found, fit = reduced_rank(start, towards, fitted, others, RIDGES, 3)
    assert fit.held_out[1] <= fit.held_out[0]
    assert fit.held_out[1] == pytest.approx(found.error(others, found.bias(fitted)))
    assert (found is start) == (fit.rounds == 0)
    assert len(fit.ridges) == fit.rounds <= 3


def test_what_is_right_already_is_left_alone() -> None:
    heads, u = heads_of(3), normal(0, 100, HEADS * WIDTH)
    joint = moments_of(u, u @ heads.maps().T + 1)
    towards = (heads.decode @ heads.encode).clone()
    swept = sweep(heads, towards, joint, 0.1)
    torch.testing.assert_close(swept.maps(), heads.maps(), rtol=1e-8, atol=1e-8)


def test_inputs_that_never_vary_do_no_harm() -> None:
    u, y = sampled(0, 50, 0.1)
    u[:, 2 * WIDTH :] = 4.0
    found = sweep(heads_of(3), torch.zeros(HEADS, OUTPUTS, WIDTH).double(), moments_of(u, y), 0.1)
    assert found.maps().isfinite().all()
    root, _ = roots(moments_of(u, y).covariance)
    assert root.isfinite().all()
