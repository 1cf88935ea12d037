"""Refit of what feeds a nonlinearity: Gauss-Newton on y ≈ φ(z Wᵀ) Bᵀ + b, without ever forming its matrix.

A refit of B alone leaves the kept rows of W as they were chosen. With R = y - φ(pre) Bᵀ - b, the best small change Δ of
W is the linear least-squares problem min ‖R - (φ'(pre) ∘ zΔᵀ) Bᵀ‖² + λ‖Δ‖², in coordinates in which its diagonal is
about one: z whitened, though not where it hardly varies, rows scaled by ‖B_:j‖ rms φ'_j. One Golub-Kahan
bidiagonalisation solves it for every λ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from corp_cli.linalg.fit import Fit
from corp_cli.linalg.lowrank import roots
from corp_cli.linalg.moments import RunningMoments, plus_diagonal, relative
from corp_cli.linalg.ridge import refit, squared_error

Units = Callable[..., Tensor]  # one or two pre-activations of every unit → its value, each unit for itself
CHUNK = 2**12  # tokens at a time: bounds what is held besides the tokens and the slopes
FILLED = 2**25  # values of units that keep a GPU busy: so many tokens at a time there, if more
STEPS = 8  # of the bidiagonalisation
SIZES = (1.0, 0.5, 0.25)  # of the step, until the error falls
FLOOR = 1.0  # of variances in the whitening, in means of those above 0: what z hardly does makes weights round badly
FINE = 1e-3  # errors below it are found token by token: in moments, of rounded values perhaps, they are lost
LEAST_GAIN = 1e-3  # of the held-out error, for which a round is taken
ENOUGH = 1e-2  # of it: a round that gains less is the last, since the next one gains less again


def chunk(width: int, device: torch.device) -> int:
    """How many tokens are worked on together, of layers with so many units."""
    return max(CHUNK, FILLED // width) if device.type == "cuda" else CHUNK


@dataclass(frozen=True)
class Tokens:
    """Inputs z [n, D], with a column of ones where the layer has biases, targets y [n, O], weights [n] of sum 1."""

    z: Tensor
    y: Tensor
    weights: Tensor

    def chunks(self, width: int) -> Iterator[slice]:
        """Rows that are worked on together, in layers of so many units."""
        step = chunk(width, self.z.device)
        return (slice(start, start + step) for start in range(0, len(self.z), step))

    @cached_property
    def whitened(self) -> tuple[Tensor, Tensor]:
        """(z', C') with z' = zC', C' = (C + FLOOR mean(diag C) I)^-½ and C = E[zzᵀ], the mean of what is not zero."""
        gram = torch.zeros(self.z.shape[1], self.z.shape[1], dtype=torch.float64, device=self.z.device)
        for rows in self.chunks(self.z.shape[1]):
            scaled = self.z[rows] * self.weights[rows].sqrt()[:, None]
            gram += scaled.T @ scaled
        energy = gram.diagonal()
        _, white = roots(plus_diagonal(gram, FLOOR * energy.sum() / (energy > 0).sum().clamp(min=1)))
        white = white.to(self.z)
        return self.z @ white, white


@dataclass(frozen=True)
class Layers:
    """ŷ = φ(z W₁ᵀ, …) Bᵀ + b: first [P, d, D], one W for each of the P pre-activations of a unit; B [O, d], b [O]."""

    first: Tensor
    second: Tensor
    bias: Tensor


def gauss_newton(
    start: Layers,
    units: Units,
    fitted: Tokens,
    held_out: Tokens,
    ridges: tuple[float, ...],
    rounds: int,
    ridge_lambda: float,
    coarse: torch.dtype | None = None,
) -> tuple[Layers, Fit]:
    """`start` after up to `rounds` rounds, each with the λ of `ridges` that is best on `held_out`, and what they gave.

    A round moves W and then solves B and b in closed form, with a ridge towards what they are. It is taken only where
    the error on `fitted` falls and that on `held_out` falls with it, so that a layer that would overfit stays. Later
    rounds try only the λ taken last and its neighbours, and it alone once it was taken twice. coarse: what steps are
    looked for in, since only their errors decide (None: the dtype of all else).
    """
    layers, taken = start, list[float]()
    first = now = error(start, units, fitted), error(start, units, held_out)
    for _ in range(rounds):
        tried = worth_trying(ridges, taken)
        found = [
            (error(moved, units, held_out), on_fitted, ridge, moved)
            for ridge, step in zip(tried, steps_of(layers, units, fitted, tried, STEPS, coarse), strict=True)
            for on_fitted, moved in [downhill(layers, step, units, fitted, now[0], ridge_lambda)]
        ]
        on_held_out, on_fitted, ridge, moved = min(found, key=lambda one: one[0])
        if not on_held_out < (1 - LEAST_GAIN) * now[1] or not on_fitted < now[0]:
            break
        gained = 1 - on_held_out / now[1]
        layers, now = moved, (on_fitted, on_held_out)
        taken.append(ridge)
        if gained < ENOUGH:
            break
    return layers, Fit(len(taken), tuple(taken), (first[0], now[0]), (first[1], now[1]))


def worth_trying(ridges: tuple[float, ...], taken: list[float]) -> tuple[float, ...]:
    """Of `ridges`, in order, those worth it in the round after those that took `taken`."""
    if not taken:
        return ridges
    last, settled = ridges.index(taken[-1]), taken[-1:] == taken[-2:-1]
    return ridges[last : last + 1] if settled else ridges[max(0, last - 1) : last + 2]


def downhill(
    layers: Layers, step: Tensor, units: Units, fitted: Tokens, before: float, ridge_lambda: float
) -> tuple[float, Layers]:
    """(error on `fitted`, W + tΔ with B and b solved anew) for the first t of `SIZES` with which it falls, or as is."""
    for size in SIZES:
        moved = Layers(layers.first + size * step, layers.second, layers.bias)
        after, solved = solve_second(moved, units, fitted, ridge_lambda)
        if after < before:
            return after, solved
    return before, layers


def error(layers: Layers, units: Units, tokens: Tokens) -> float:
    """Σ w ‖y - ŷ‖² / Σ w ‖y - ȳ‖², with ȳ the weighted mean."""
    lost = total = tokens.y.new_zeros((), dtype=torch.float64)
    mean = tokens.weights @ tokens.y
    for rows in tokens.chunks(layers.second.shape[1]):
        weights, y = tokens.weights[rows], tokens.y[rows]
        found = units(*pre_activations(layers, tokens.z[rows])) @ layers.second.T + layers.bias
        lost = lost + (weights @ (y - found).square()).sum(dtype=torch.float64)
        total = total + (weights @ (y - mean).square()).sum(dtype=torch.float64)
    return float(lost / total) if total > 0 else 0.0


def pre_activations(layers: Layers, z: Tensor) -> Tensor:
    """z Wᵀ for every W, [P, n, d]."""
    return torch.einsum("nD,pdD->pnd", z, layers.first)


def with_slopes(units: Units, pre: Tensor) -> tuple[Tensor, Tensor]:
    """(φ(pre) [n, d], φ'(pre) [P, n, d]): exact, since no unit depends on another."""
    with torch.enable_grad():
        pre = pre.detach().requires_grad_()
        values = units(*pre)
        (slopes,) = torch.autograd.grad(values.sum(), pre)
    return values.detach(), slopes


def solve_second(layers: Layers, units: Units, tokens: Tokens, ridge_lambda: float) -> tuple[float, Layers]:
    """(`error`, `layers` with B and b the ridge solution for W as it is, towards B as it was); see `ridge.refit`."""
    width = layers.second.shape[1]
    joint = RunningMoments(width + tokens.y.shape[1], tokens.z.device)
    for rows in tokens.chunks(layers.second.shape[1]):
        values = units(*pre_activations(layers, tokens.z[rows]))
        joint.add(torch.cat([values, tokens.y[rows]], 1), tokens.weights[rows])
    moments = joint.result()
    second, bias = refit(layers.second.double(), moments, ridge_lambda)
    lost = relative(squared_error(second, bias, moments), moments.covariance.diagonal()[width:].sum())
    solved = Layers(layers.first, second.to(layers.second), bias.to(layers.bias))
    return lost if lost > FINE else error(solved, units, tokens), solved


# --- the linearised problem -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linearised:
    """A: Δ' → (I - rrᵀ) (Σ_p S_p ∘ z'Δ'_pᵀ) Bᵀ on whitened z' [n, D] and scaled rows Δ' [P, d, D].

    r = √w takes the weighted mean away: b is solved afterwards, so that constants do not count. z, S and B may be of a
    coarser dtype than the others.
    """

    z: Tensor
    slopes: Tensor  # S [P, n, d]: φ'_p, rows times √w, over the scale of their unit
    second: Tensor
    root: Tensor  # r [n], of norm 1
    residual: Tensor  # [n, O], as what A gives
    back: Tensor  # [D, D], (C + FLOOR mean(diag C) I)^-½ with C = E[zzᵀ]: Δ = Δ' back / scale
    scale: Tensor  # [P, d, 1]; infinite where a unit does not reach y

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows that are worked on together, and room for two values of each of their units."""
        count, width = self.slopes.shape[1:]
        step = chunk(width, self.z.device)
        room = self.z.new_empty(2, min(step, count), width)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            yield rows, *room[:, : rows.stop - rows.start]

    def apply(self, step: Tensor, u: Tensor, share: float) -> None:
        """u ← AΔ' - `share` u, for a u [n, O] that A could give, in its place: memory is slower than arithmetic."""
        step = step.to(self.z.dtype)
        for rows, change, one in self.chunks():
            torch.mm(self.z[rows], step[0].T, out=change).mul_(self.slopes[0, rows])
            for part in range(1, len(step)):
                torch.mm(self.z[rows], step[part].T, out=one)
                change.addcmul_(one, self.slopes[part, rows])
            _add_product(u[rows], change, self.second.T, -share)
        u.addr_(self.root, self.root @ u, alpha=-1)

    def adjoint(self, u: Tensor) -> Tensor:
        """Aᵀu [P, d, D], for a u [n, O] that A could give."""
        step = u.new_zeros(len(self.slopes), self.slopes.shape[2], self.z.shape[1])
        for rows, reach, one in self.chunks():
            torch.mm(u[rows].to(self.z.dtype), self.second, out=reach)
            for part, slopes in zip(step, self.slopes, strict=True):
                _add_product(part, torch.mul(reach, slopes[rows], out=one).T, self.z[rows])
        return step


def _add_product(total: Tensor, a: Tensor, b: Tensor, share: float = 1.0) -> None:
    """total ← `share` total + ab, of a dtype that may be finer than theirs."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=share)
    else:
        total.mul_(share).add_(a @ b)


def linearise(layers: Layers, units: Units, tokens: Tokens, coarse: torch.dtype | None = None) -> Linearised:
    """The problem at `layers`; see `gauss_newton`."""
    parts, width, _ = layers.first.shape
    slopes, root = tokens.z.new_empty(parts, len(tokens.z), width), tokens.weights.sqrt()
    residual = torch.empty_like(tokens.y)
    for rows in tokens.chunks(layers.second.shape[1]):
        values, found = with_slopes(units, pre_activations(layers, tokens.z[rows]))
        slopes[:, rows] = found * root[rows, None]
        residual[rows] = (tokens.y[rows] - values @ layers.second.T - layers.bias) * root[rows, None]
    residual.addr_(root, root @ residual, alpha=-1)
    z, white = tokens.whitened
    reach = slopes.norm(dim=1) * layers.second.norm(dim=0)
    scale = torch.where(reach > 0, reach, torch.inf)[..., None]
    slopes /= scale.mT
    z, slopes, second = (part.to(coarse or z.dtype) for part in (z, slopes, layers.second))
    return Linearised(z, slopes, second, root, residual, white, scale)


def steps_of(
    layers: Layers,
    units: Units,
    tokens: Tokens,
    ridges: tuple[float, ...],
    steps: int = STEPS,
    coarse: torch.dtype | None = None,
) -> list[Tensor]:
    """Δ [P, d, D] for every λ of `ridges`: argmin ‖R - AΔ'‖² + λ‖Δ'‖² over what `steps` steps reach.

    With A V = U L, V orthonormal and L lower bidiagonal (Golub and Kahan, 1965), Δ' = V (LᵀL + λI)⁻¹ Lᵀ ‖R‖ e₁: the
    conjugate gradients of every λ at the price of one (Paige and Saunders' LSQR, 1982).
    """
    problem = linearise(layers, units, tokens, coarse)
    V, L, norm = bidiagonalise(problem, steps)
    if not len(V):
        return [torch.zeros_like(layers.first) for _ in ridges]
    target = L[0] * norm  # Lᵀ ‖R‖ e₁
    identity = torch.eye(len(V)).to(L)
    found = [torch.linalg.solve(L.T @ L + ridge * identity, target) for ridge in ridges]
    return [torch.einsum("k,kpdD->pdD", y.to(V), V) @ problem.back / problem.scale for y in found]


def bidiagonalise(problem: Linearised, steps: int) -> tuple[Tensor, Tensor, float]:
    """(V [k, P, d, D], L [k + 1, k] float64, ‖R‖) with AV = UL and R = ‖R‖ u₁; k < `steps` where that is all."""
    u = problem.residual.clone()  # times the β that comes with it: one pass less over all tokens
    norm = beta = float(u.norm())
    diagonal: list[float] = []
    below: list[float] = []
    v = problem.adjoint(u) / (norm or 1.0)
    least = torch.finfo(v.dtype).eps * float(v.norm())
    V = v.new_empty(steps, *v.shape)
    while len(diagonal) < steps:
        known = V[: len(diagonal)].flatten(1)
        for _ in range(2):  # orthogonal to those before, up to rounding
            v = v - (known.T @ (known @ v.flatten())).view_as(v)
        alpha = float(v.norm())
        if not alpha > least:
            break
        v = v / alpha
        V[len(diagonal)] = v
        problem.apply(v, u, alpha / beta)
        beta = float(u.norm())
        diagonal.append(alpha)
        below.append(beta)
        if not beta > least:
            break
        v = problem.adjoint(u) / beta - beta * v
    L = torch.zeros(len(diagonal) + 1, len(diagonal), dtype=torch.float64, device=u.device)
    L.diagonal()[:] = torch.tensor(diagonal, dtype=torch.float64)
    L[1:].diagonal()[:] = torch.tensor(below, dtype=torch.float64)
    return V[: len(diagonal)], L, norm
