"""Sizes under a budget: a multiple-choice knapsack over measured damage curves."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
from torch import Tensor

from corp_cli.config.prune import SEARCHES, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.models.blocks import Block, Sizes
from corp_cli.models.spec import ModelSpec
from corp_cli.sizes.costs import Cost, TokenCosts, cost_of, dense_cost, linear_costs, mac_costs
from corp_cli.sizes.uniform import kept_size, step_of

LEAST = 0.1  # a budget leaves at least this fraction of every group
TIE = 1e-6  # fraction of the largest damage that does not count
SECONDS = 60  # for the solver; it stops much earlier


@dataclass(frozen=True)
class Choice:
    """What some groups of one block, whose cost is not a sum, may be cut to, with the damage and the cost of each."""

    block: int
    groups: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    damage: tuple[float, ...]
    cost: tuple[float, ...]


def solve(choices: list[Choice], budget: float) -> tuple[list[int], float]:
    """(index of the size taken for every choice, predicted damage): least Σ damage with Σ cost <= `budget`.

    One binary variable per size, exactly one of which is taken. Raises CorpError when even the smallest sizes cost
    too much.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # here, since scipy takes long to import
    from scipy.sparse import coo_array

    least = sum(min(choice.cost) for choice in choices)
    if least > budget:
        raise CorpError(
            f"The budget cannot be met: the smallest sizes leave {least:.4g} where {budget:.4g} are allowed; "
            "remove less, or let more groups be pruned."
        )
    counts = [len(choice.sizes) for choice in choices]
    owner = np.repeat(np.arange(len(choices)), counts)
    damage = np.concatenate([choice.damage for choice in choices])
    cost = np.concatenate([choice.cost for choice in choices])
    one_each = coo_array((np.ones(len(owner)), (owner, np.arange(len(owner)))), shape=(len(choices), len(owner)))
    scale = max(float(cost.max()), 1e-300)
    # Among equals the larger sizes stay. Damage is scaled to 1000 at most, for the solver's absolute tolerance.
    objective = 1e3 * (damage / max(float(damage.max()), 1e-300) + TIE * (1 - cost / scale))
    with no_stdout():
        found = milp(
            objective,
            constraints=[
                LinearConstraint(one_each.tocsc(), 1, 1),
                LinearConstraint(cost[None] / scale, -np.inf, budget / scale),
            ],
            integrality=np.ones(len(owner)),
            bounds=Bounds(0, 1),
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
        )
    if found.x is None:
        raise RuntimeError(f"the solver found no plan within {SECONDS} s: {found.message}")
    starts = np.cumsum([0, *counts])
    taken = [int(np.argmax(found.x[a:b])) for a, b in pairwise(starts)]
    return taken, float(sum(choice.damage[i] for choice, i in zip(choices, taken, strict=True)))


@contextmanager
def no_stdout() -> Iterator[None]:
    """While in force, nothing reaches stdout: the solver prints lines for its own developers there, asked or not."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


@dataclass(frozen=True)
class Budget:
    """What may be spent: of the `dense` cost, `fraction` is to go; sizes go down from `base`, `fixed` is in no size.

    Costs are MACs of one image, parameters, or seconds of a forward pass. `updated_tokens`: how many leading ones the
    last block updates (None: all); `merge`: how many every block merges (empty: none); `token_costs`: None where none
    may be merged. `search`: how sizes are chosen, by damage or by scores, which may leave as little as they like.
    `round_to`, `device`: see `uniform.step_of`.
    """

    kind: str  # macs, params or latency
    fraction: float
    dense: float
    fixed: float
    base: tuple[Sizes, ...]
    costs: tuple[Cost, ...]
    round_to: Any
    updated_tokens: int | None = None
    token_costs: TokenCosts | None = None
    merge: tuple[int, ...] = ()
    search: str = "damage"
    device: str = "cpu"

    @property
    def limit(self) -> float:
        """On the sum of costs."""
        return (1 - self.fraction) * self.dense - self.fixed

    @property
    def least(self) -> float:
        """The sum of the costs of the smallest sizes."""
        return sum(min(cost.at(self.choices(cost))) for cost in self.costs)

    def merging(self, merge: tuple[int, ...]) -> Budget:
        """The same for a model whose blocks merge so many tokens: costs go with the tokens that a sublayer sees."""
        if self.token_costs is None or not any(merge):
            return self
        scaled, fixed = [], self.fixed + self.token_costs.of_merging(merge)
        for i, shares, whole in self.token_costs.by_block(merge):
            for groups, share, sublayer in zip((("qk", "vo", "heads"), ("mlp",)), shares, whole, strict=True):
                costs = [cost for cost in self.costs if cost.block == i and set(cost.groups) <= set(groups)]
                scaled += [replace(cost, values=cost.values * share) for cost in costs]
                fixed += (share - 1) * (sublayer - sum(float(cost.values.flat[-1]) for cost in costs))
        return replace(self, costs=tuple(scaled), fixed=fixed, merge=merge)

    def wanted(self) -> list[tuple[int, str]]:
        """Every (block, group) that may be cut."""
        return [(cost.block, group) for cost in self.costs for group in cost.groups]

    def candidates(self, block: int, group: str) -> tuple[int, ...]:
        """Sizes that a group may be cut to, ascending: multiples of its step, and the dense size."""
        dense, step = getattr(self.base[block], group), self.step(block, group)
        least = max(1, LEAST * dense) if self.search == "damage" else 1
        return tuple(sorted({size for size in range(step, dense, step) if size >= least} | {dense}))

    def step(self, block: int, group: str) -> int:
        """What sizes of a group of a block are multiples of."""
        return step_of(self.round_to, group, getattr(self.base[block], group), self.device)

    def choices(self, cost: Cost) -> tuple[tuple[int, ...], ...]:
        """Every combination of sizes that the groups of `cost` may be cut to."""
        return tuple(product(*(self.candidates(cost.block, group) for group in cost.groups)))

    def cost(self, sizes: tuple[Sizes, ...]) -> float:
        """What `sizes` cost in all."""
        return sum(cost.at([tuple(getattr(sizes[cost.block], g) for g in cost.groups)])[0] for cost in self.costs)

    def speedup(self, sizes: tuple[Sizes, ...]) -> float | None:
        """Dense over pruned time, as the table has it; None for a budget that is not of time."""
        return self.dense / (self.fixed + self.cost(sizes)) if self.kind == "latency" else None

    def require_met(self) -> Budget:
        """Itself. Raises CorpError, with what can be removed at most, when the smallest sizes cost too much.

        So it does where no group may be cut, whatever plain blocks or merged tokens would save.
        """
        ways = [self] if self.token_costs is None else [self, self.merging(self.token_costs.most())]
        # On some devices merging costs more time than it saves.
        least = min(way.fixed + way.least for way in ways) if self.costs else self.dense
        if not self.costs or all(way.least > way.limit for way in ways):
            also = ", or remove heads too (sparsity.heads)" if self.search == "damage" else ""
            raise CorpError(
                f"sparsity.{self.kind}={self.fraction:g} cannot be met: at most "
                f"{max(0.0, 1 - least / self.dense):.3f} of this model can be removed at "
                f"sparsity.round_to={self.round_to}; ask for less{also}."
            )
        return self


def make_budget(
    spec: ModelSpec,
    blocks: tuple[Block, ...],
    cfg: SparsityConfig,
    base: tuple[Sizes, ...],
    updated_tokens: int | None = None,
    merges: bool = False,
    device: str = "cpu",
) -> Budget:
    """The budget of `sparsity.macs` or `sparsity.params`: a fraction of the dense model's cost to remove.

    merges: whether tokens may be merged for it. Raises CorpError, with what can be removed at most, when the smallest
    sizes cost too much.
    """
    kind, fraction = ("params", cfg.params) if cfg.macs is None else ("macs", cfg.macs)
    assert fraction is not None
    dense = dense_cost(spec, kind)
    costs = linear_costs(spec, blocks, base, kind, updated_tokens, SEARCHES[cfg.search])
    fixed = cost_of(spec, blocks, base, kind, updated_tokens) - sum(float(cost.values[-1]) for cost in costs)
    by_token = mac_costs(spec, blocks, base, updated_tokens) if merges else None
    found = Budget(kind, fraction, dense, fixed, base, costs, cfg.round_to, updated_tokens, by_token)
    return replace(found, search=cfg.search, device=device).require_met()


def uniform(budget: Budget, fraction: float) -> tuple[Sizes, ...]:
    """Sizes with `fraction` of every group that may be cut removed."""
    sizes = list(budget.base)
    for i, group in budget.wanted():
        dense = getattr(budget.base[i], group)
        sizes[i] = replace(sizes[i], **{group: kept_size(dense, fraction, budget.step(i, group))})
    return tuple(sizes)


def matching_fraction(budget: Budget) -> float:
    """The least fraction that, removed of every group alike, keeps the budget."""
    fractions = [percent / 100 for percent in range(0, 91, 2)]
    return next((f for f in fractions if budget.cost(uniform(budget, f)) <= budget.limit), fractions[-1])


def spend(budget: Budget, damage: dict[tuple[int, str], Tensor]) -> tuple[tuple[Sizes, ...], float]:
    """(sizes, predicted damage): the least damage within the budget; damage[block, group] by kept size, [dense + 1]."""
    choices = []
    for cost in budget.costs:
        options = budget.choices(cost)
        curves = [damage[cost.block, group] for group in cost.groups]
        hurt = tuple(sum(float(c[size]) for c, size in zip(curves, sizes, strict=True)) for sizes in options)
        choices.append(Choice(cost.block, cost.groups, options, hurt, cost.at(options)))
    taken, predicted = solve(choices, budget.limit)
    sizes = list(budget.base)
    for choice, i in zip(choices, taken, strict=True):
        sizes[choice.block] = replace(sizes[choice.block], **dict(zip(choice.groups, choice.sizes[i], strict=True)))
    return tuple(sizes), predicted
