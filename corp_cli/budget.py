"""Sizes under a budget: a multiple-choice knapsack over measured damage curves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor

from corp_cli.config import SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.flops import count_macs
from corp_cli.models.attention import AttentionSizes
from corp_cli.models.blocks import Block, Sizes
from corp_cli.models.loading import ModelSpec, parameters, skeleton
from corp_cli.models.resize import MlpSizes, PrunedSizes, resize
from corp_cli.rank import kept_size

BUDGETED = ("mlp", "qk", "vo")
LEAST = 0.1  # a budget leaves at least this fraction of every group
SECONDS = 60  # for the solver; it stops much earlier


@dataclass(frozen=True)
class Choice:
    """What one group of one block may be cut to: kept `sizes`, with the damage and the cost of each."""

    block: int
    group: str
    sizes: tuple[int, ...]
    damage: tuple[float, ...]
    cost: tuple[float, ...]


def solve(choices: list[Choice], budget: float) -> tuple[list[int], float]:
    """(index of the size taken for every choice, predicted damage): least Σ damage with Σ cost <= `budget`.

    One binary variable per size, exactly one of which is taken. Raises CorpError when even the smallest sizes cost
    too much.
    """
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
    found = milp(
        damage,
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


def cost_of(spec: ModelSpec, blocks: tuple[Block, ...], sizes: tuple[Sizes, ...], kind: str) -> int:
    """MACs of one image, or parameters, of the model at these sizes, counted on the meta device."""
    model = skeleton(spec)
    resize(model, {b.name: _pruned_sizes(b, s) for b, s in zip(blocks, sizes, strict=True)})
    return count_macs(model, spec.data["input_size"]) if kind == "macs" else parameters(model)


def _pruned_sizes(block: Block, sizes: Sizes) -> PrunedSizes:
    attn = mlp = None
    if block.sizes.heads > 0:
        attn = AttentionSizes(sizes.heads, sizes.qk, sizes.vo, block.scale, True, True)
    if block.sizes.mlp > 0:
        mlp = MlpSizes(sizes.mlp, True)
    return PrunedSizes(attn, mlp)


def unit_costs(
    spec: ModelSpec, blocks: tuple[Block, ...], base: tuple[Sizes, ...], kind: str
) -> dict[tuple[int, str], float]:
    """(block, group) → cost of one unit of that group. MACs and parameters are linear in every size."""
    costs: dict[tuple[int, str], float] = {}
    known: dict[tuple[Sizes, str], float] = {}
    whole = cost_of(spec, blocks, base, kind)
    for i, sizes in enumerate(base):
        for group in BUDGETED:
            size = getattr(sizes, group)
            if group in blocks[i].refusals or size < 2:
                continue
            if (sizes, group) not in known:
                smaller = list(base)
                smaller[i] = replace(sizes, **{group: size // 2})
                known[sizes, group] = (whole - cost_of(spec, blocks, tuple(smaller), kind)) / (size - size // 2)
            costs[i, group] = known[sizes, group]
    return costs


# --- budgets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """What may be spent: `limit` on the sum of unit costs over all (block, group), from sizes `base` downwards."""

    base: tuple[Sizes, ...]
    unit: dict[tuple[int, str], float]
    limit: float
    round_to: int

    def candidates(self, block: int, group: str) -> tuple[int, ...]:
        """Sizes that a group may be cut to, ascending: multiples of `round_to`, and the dense size."""
        dense = getattr(self.base[block], group)
        least = max(1, LEAST * dense)
        return tuple(sorted({size for size in range(self.round_to, dense, self.round_to) if size >= least} | {dense}))

    def cost(self, sizes: tuple[Sizes, ...]) -> float:
        """Σ unit cost x size."""
        return sum(unit * getattr(sizes[i], group) for (i, group), unit in self.unit.items())


def make_budget(spec: ModelSpec, blocks: tuple[Block, ...], cfg: SparsityConfig, base: tuple[Sizes, ...]) -> Budget:
    """The budget of `sparsity.macs` or `sparsity.params`: a fraction of the dense model's cost to remove.

    Raises CorpError, with what can be removed at most, when the smallest sizes cost too much.
    """
    kind = "macs" if cfg.macs is not None else "params"
    fraction = cfg.macs if cfg.macs is not None else cfg.params
    assert fraction is not None
    dense = cost_of(spec, blocks, tuple(block.sizes for block in blocks), kind)
    unit = unit_costs(spec, blocks, base, kind)
    spent = sum(cost * getattr(base[i], group) for (i, group), cost in unit.items())
    fixed = cost_of(spec, blocks, base, kind) - spent
    budget = Budget(base, unit, (1 - fraction) * dense - fixed, cfg.round_to)
    least = sum(cost * budget.candidates(i, group)[0] for (i, group), cost in unit.items())
    if least > budget.limit:
        raise CorpError(
            f"sparsity.{kind}={fraction:g} cannot be met: at most {1 - (fixed + least) / dense:.3f} of this model can "
            f"be removed at sparsity.round_to={cfg.round_to}; ask for less, or remove heads too (sparsity.heads)."
        )
    return budget


def matching_uniform(budget: Budget) -> tuple[Sizes, ...]:
    """The largest uniform sizes that keep the budget: the context in which damage is measured."""
    for percent in range(0, 91, 2):
        sizes = list(budget.base)
        for i, group in budget.unit:
            dense = getattr(budget.base[i], group)
            sizes[i] = replace(sizes[i], **{group: kept_size(dense, percent / 100, budget.round_to)})
        if budget.cost(tuple(sizes)) <= budget.limit:
            return tuple(sizes)
    return tuple(sizes)


def spend(budget: Budget, damage: dict[tuple[int, str], Tensor]) -> tuple[tuple[Sizes, ...], float]:
    """(sizes, predicted damage): the least damage within the budget; damage[block, group] by kept size, [dense + 1]."""
    choices = []
    for (i, group), unit in budget.unit.items():
        options = budget.candidates(i, group)
        by_size = tuple(float(damage[i, group][size]) for size in options)
        choices.append(Choice(i, group, options, by_size, tuple(unit * size for size in options)))
    taken, predicted = solve(choices, budget.limit)
    sizes = list(budget.base)
    for choice, i in zip(choices, taken, strict=True):
        sizes[choice.block] = replace(sizes[choice.block], **{choice.group: choice.sizes[i]})
    return tuple(sizes), predicted
