"""Gauss-Newton in front of a nonlinearity: against a dense least-squares solve, and what no round may make worse."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.activations import quick_gelu

from corp_cli.linalg.gauss_newton import (
    ENOUGH,
    Layers,
    Tokens,
    Units,
    error,
    gauss_newton,
    linearise,
    pre_activations,
    solve_second,
    steps_of,
    with_slopes,
    worth_trying,
)
from tests.linalg.test_linalg import normal

UNITS: dict[str, tuple[int, Units]] = {
    "gelu": (1, F.gelu),
    "gelu_tanh": (1, lambda x: F.gelu(x, approximate="tanh")),
    "quick_gelu": (1, lambda x: quick_gelu(x)),
    "silu": (1, F.silu),
    "relu": (1, F.relu),
    "gated silu": (2, lambda g, x: F.silu(g) * x),
    "gated gelu": (2, lambda g, x: F.gelu(g) * x),
}
RIDGES = (0.01, 0.1, 1.0)
every = pytest.mark.parametrize("name", list(UNITS))


def problem(seed: int, parts: int, n: int = 60, dtype: torch.dtype = torch.float64) -> tuple[Layers, Tokens]:
    z = torch.cat([normal(seed, n, 4), torch.ones(n, 1, dtype=torch.float64)], 1)
    weights = normal(seed + 1, n).abs() + 0.1
    first = torch.stack([normal(seed + 2 + part, 6, 5) for part in range(parts)])
    layers = Layers(first.to(dtype), normal(seed + 4, 3, 6).to(dtype), normal(seed + 5, 3).to(dtype))
    return layers, Tokens(z.to(dtype), normal(seed + 6, n, 3).to(dtype), (weights / weights.sum()).to(dtype))


@every
def test_slopes_are_those_of_finite_differences(name: str) -> None:
    parts, units = UNITS[name]
    pre = 2 * normal(0, parts, 20, 6)
    _, slopes = with_slopes(units, pre)
    for part in range(parts):
        step = torch.zeros_like(pre)
        step[part] = 1e-6
        numeric = (units(*(pre + step)) - units(*(pre - step))) / 2e-6
        torch.testing.assert_close(slopes[part], numeric, rtol=1e-6, atol=1e-7)


@every
@pytest.mark.parametrize("ridge", RIDGES)
def test_the_linearised_problem_is_solved_as_by_a_dense_solver(name: str, ridge: float) -> None:
    parts, units = UNITS[name]
    layers, tokens = problem(1, parts)
    (found,) = steps_of(layers, units, tokens, (ridge,), steps=200)
    values, slopes = with_slopes(units, pre_activations(layers, tokens.z))
    residual = tokens.y - values @ layers.second.T - layers.bias
    columns = torch.einsum("pnd,nD,od->nopdD", slopes, tokens.z, layers.second)
    root = tokens.weights.sqrt()[:, None]
    flat = (columns * root[:, :, None, None, None]).flatten(2)
    flat, right = flat.flatten(1), residual * root
    centre = torch.eye(len(root), dtype=torch.float64) - root @ root.T
    A = (centre @ flat).unflatten(1, (3, -1)).flatten(0, 1)
    b = (centre @ right).flatten()
    made = linearise(layers, units, tokens)
    white = torch.linalg.inv(made.back)  # Δ' = scale Δ white, so that the ridge is on Δ'
    to_scaled = torch.block_diag(*(scale * white.T for scale in made.scale.flatten()))
    scaled = A @ torch.linalg.inv(to_scaled)
    stacked = torch.cat([scaled, ridge**0.5 * torch.eye(scaled.shape[1], dtype=torch.float64)])
    wanted = torch.linalg.lstsq(stacked, torch.cat([b, b.new_zeros(scaled.shape[1])])[:, None]).solution
    wanted = torch.linalg.inv(to_scaled) @ wanted
    torch.testing.assert_close(found.flatten(), wanted[:, 0], rtol=1e-8, atol=1e-8)


def test_the_adjoint_is_that_of_the_map() -> None:
    layers, tokens = problem(2, 2)
    made = linearise(layers, UNITS["gated silu"][1], tokens)
    step, out = normal(3, 2, 6, 5), normal(4, 60, 3)
    before, out = made.residual.clone(), out - made.root[:, None] * (made.root @ out)  # as A gives it
    made.apply(step, before, 0.5)
    there = before + 0.5 * made.residual
    assert float((there * out).sum()) == pytest.approx(float((step * made.adjoint(out)).sum()), rel=1e-10)
    torch.testing.assert_close(made.root @ there, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def fit(layers: Layers, units: Units, fitted: Tokens, held_out: Tokens, **how: Any) -> tuple[Layers, Any]:
    return gauss_newton(layers, units, fitted, held_out, how.get("ridges", RIDGES), how.get("rounds", 4), 0.1)


@every
def test_steps_looked_for_in_bfloat16_are_about_as_good(name: str) -> None:
    parts, units = UNITS[name]
    layers, tokens = problem(7, parts, 200, torch.float32)
    _, exact = gauss_newton(layers, units, tokens, tokens, RIDGES, 3, 0.1)
    new, coarse = gauss_newton(layers, units, tokens, tokens, RIDGES, 3, 0.1, torch.bfloat16)
    gains = [1 - found.fitted[1] / found.fitted[0] for found in (exact, coarse)]
    assert gains[1] > 0.9 * gains[0] > 0.1
    assert new.first.dtype == torch.float32
    assert coarse.fitted[1] == pytest.approx(error(new, units, tokens))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(UNITS)), n=st.sampled_from([1, 3, 60]))
def test_no_error_rises(seed: int, name: str, n: int) -> None:
    parts, units = UNITS[name]
    (layers, fitted), (_, held_out) = problem(seed, parts, n), problem(seed + 50, parts)
    new, found = fit(layers, units, fitted, held_out)
    assert all(tensor.isfinite().all() for tensor in vars(new).values())
    for (before, after), tokens in ((found.fitted, fitted), (found.held_out, held_out)):
        assert after <= before
        assert before == pytest.approx(error(layers, units, tokens))
        assert after == pytest.approx(error(new, units, tokens))


@every
def test_what_is_exact_is_left_alone(name: str) -> None:
    parts, units = UNITS[name]
    layers, tokens = problem(5, parts)
    y = units(*pre_activations(layers, tokens.z)) @ layers.second.T + layers.bias
    new, found = fit(layers, units, Tokens(tokens.z, y, tokens.weights), Tokens(tokens.z, y, tokens.weights))
    assert found.fitted[1] <= 1e-20
    for name, tensor in vars(new).items():
        torch.testing.assert_close(tensor, getattr(layers, name), rtol=1e-6, atol=1e-6)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_of_fewer_units_comes_nearer_to_a_wide_one(name: str, dtype: torch.dtype) -> None:
    parts, units = UNITS[name]
    wide, tokens = problem(6, parts, 400, dtype)
    y = units(*pre_activations(wide, tokens.z)) @ wide.second.T
    first, rest = (
        Tokens(tokens.z[s], y[s], tokens.weights[s] / tokens.weights[s].sum()) for s in (slice(300), slice(300, 400))
    )
    _, cut = solve_second(Layers(wide.first[:, :3], wide.second[:, :3], wide.bias), units, first, 1e-6)
    new, found = fit(cut, units, first, rest)
    assert found.rounds > 0
    assert found.held_out[1] < 0.9 * found.held_out[0]
    assert new.first.dtype is dtype


def test_units_that_reach_nothing_and_inputs_that_are_constant_stay_finite() -> None:
    layers, tokens = problem(7, 1)
    second = layers.second.clone()
    second[:, 0] = 0
    dead = Layers(layers.first, second, layers.bias)
    z = tokens.z.clone()
    z[:, 1:4] = 2.0
    for step in steps_of(dead, UNITS["relu"][1], Tokens(z, tokens.y, tokens.weights), RIDGES):
        assert step.isfinite().all()
        assert not step[:, 0].any()


@pytest.mark.parametrize(
    ("taken", "tried"),
    [
        ([], RIDGES),
        ([0.01], RIDGES[:2]),
        ([0.1], RIDGES),
        ([1.0], RIDGES[1:]),
        ([0.1, 0.1], (0.1,)),
        ([1.0, 0.1], RIDGES),
    ],
)
def test_ridges_settle(taken: list[float], tried: tuple[float, ...]) -> None:
    assert worth_trying(RIDGES, taken) == tried


def test_a_round_that_gains_little_is_the_last() -> None:
    layers, tokens = problem(8, 1, 300)
    held_out = Tokens(tokens.z, tokens.y, tokens.weights)
    _, found = fit(layers, F.gelu, tokens, held_out, rounds=30)
    assert 1 < found.rounds < 30
    errors = [fit(layers, F.gelu, tokens, held_out, rounds=n)[1].held_out[1] for n in range(1, found.rounds + 1)]
    gains = [1 - after / before for before, after in pairwise([found.held_out[0], *errors])]
    assert all(gain >= ENOUGH for gain in gains[:-1])
    assert gains[-1] < ENOUGH
