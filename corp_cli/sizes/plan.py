"""The sizes of every block: as they were asked for, or those that do the least damage within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from corp_cli.method.rank import Scores
from corp_cli.models.blocks import TOKENS, Sizes
from corp_cli.runtime import ranks
from corp_cli.sizes.budget import Budget, spend, uniform
from corp_cli.sizes.curves import ANCHORS, Curve
from corp_cli.sizes.schedule import schedules
from corp_cli.sizes.search import highest_scores, with_tokens

# (sizes around, fractions removed at which to measure, what of) → damage curves
MeasureCurves = Callable[[tuple[Sizes, ...], tuple[float, ...], list[tuple[int, str]]], list[Curve]]


@dataclass(frozen=True)
class SizePlan:
    """Sizes of every block, how many tokens each merges, and how many leading ones the last one updates (None: all).

    `predicted_kl` is the damage that a budget expects of the sizes, in nats per image; `predicted_speedup` what a
    latency budget expects to gain; `curves` are those that it last went by.
    """

    sizes: tuple[Sizes, ...]
    updated_tokens: int | None = None
    merge: tuple[int, ...] = ()
    predicted_kl: float | None = None
    predicted_speedup: float | None = None
    curves: tuple[Curve, ...] = field(default=(), compare=False)


def choose_sizes(
    target: SizePlan | Budget, rounds: int, measure: MeasureCurves, scores: tuple[Scores, ...]
) -> SizePlan:
    """The sizes of `target`: as they are, or within the budget those of the least damage, or of the highest `scores`.

    Damage is measured in a context: every other group cut by a fraction in ANCHORS, so that budgets share their curves.
    Where tokens may be merged nothing is cut, since the groups then lose little; else damage is the mean over the two
    other contexts. In further `rounds` the context is the sizes found.
    """
    if isinstance(target, SizePlan):
        return target
    if target.search == "scores":
        sizes, merge = with_tokens(target, scores) if target.token_costs else (highest_scores(target, scores)[0], ())
        return SizePlan(sizes, target.updated_tokens, merge)
    wanted = target.wanted()
    if target.token_costs:
        wanted += [(i, TOKENS) for i in range(len(target.base) - 1)]
    fractions = contexts(target)
    curves = averaged([measure(uniform(target, fraction), ANCHORS[fraction], wanted) for fraction in fractions])
    plan = ranks.once(best_plan, target, {(c.block, c.group): c.damage for c in curves})
    for _ in range(rounds - 1):
        curves = measure(plan.sizes, ANCHORS[fractions[-1]], wanted)
        plan = ranks.once(best_plan, target, {(c.block, c.group): c.damage for c in curves})
    return replace(plan, curves=tuple(curves))


def contexts(target: Budget) -> tuple[float, ...]:
    """The fractions in ANCHORS of every group that are cut around the one measured, one after the other."""
    return (0.0,) if target.token_costs else tuple(fraction for fraction in ANCHORS if fraction > 0)


def averaged(measured: list[list[Curve]]) -> list[Curve]:
    """The mean damage of every group of every block over what was `measured` of it."""
    return [
        replace(same[0], damage=torch.stack([curve.damage for curve in same]).mean(0))
        for same in zip(*measured, strict=True)
    ]


def best_plan(target: Budget, damage: dict[tuple[int, str], Tensor]) -> SizePlan:
    """The plan with the least predicted damage, over schedules of merging; damage[block, group] by kept size."""
    ways: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    if target.token_costs is not None:
        ways = schedules([damage[i, TOKENS] for i in range(len(target.base) - 1)], target.token_costs)
    least, best = math.inf, SizePlan(target.base)
    for merge, hurt in ways:
        budget = target.merging(merge)
        if hurt < least and budget.least <= budget.limit:
            sizes, predicted = spend(budget, damage)
            if predicted + hurt < least:
                least = predicted + hurt
                best = SizePlan(sizes, target.updated_tokens, budget.merge, least, budget.speedup(sizes))
    return best
