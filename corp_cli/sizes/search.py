"""Sizes under a budget by the scores of single units: the mask search of Kwon et al. (arXiv 2204.09656, Alg. 1).

OPTIN (arXiv 2403.17921) and KCM (arXiv 2303.04185) choose so as well. The published codes may empty a block; here every
one keeps a head and a step of channels, as modules of no size cannot be run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from corp_cli.method.rank import Scores
from corp_cli.models.blocks import Sizes
from corp_cli.sizes.budget import Budget
from corp_cli.sizes.costs import Floats

SCHEDULES = 64  # numbers of tokens that are tried
ROUNDING = 1e-3  # of a MAC or a parameter, in sums of floats


@dataclass(frozen=True)
class Descent:
    """What is kept of a group when the n = 0..units with the highest scores are, in whole steps of every block.

    blocks: their indices. sizes [units + 1, blocks]; cost [units + 1], which never falls; score [units + 1]: the sum
    over all that is kept.
    """

    blocks: tuple[int, ...]
    sizes: Floats
    cost: Floats
    score: Floats


def descent(budget: Budget, scores: tuple[Scores, ...], group: str) -> Descent:
    """Every way to keep the units of `group` that score highest in all blocks, at least a step of each block."""
    costs = [cost for cost in budget.costs if cost.groups == (group,)]
    step = np.array([budget.step(cost.block, group) for cost in costs], int)
    falling = [np.sort(getattr(scores[cost.block], group).cpu().double().numpy())[::-1] for cost in costs]
    dense = np.array([len(each) for each in falling])
    least = np.minimum(step, dense)
    first = [np.where(np.arange(len(each)) < low, np.inf, each) for each, low in zip(falling, least, strict=True)]
    owner = np.repeat(np.arange(len(costs)), dense)[np.argsort(-np.concatenate([[], *first]), kind="stable")]
    counts = np.concatenate([np.zeros((1, len(costs))), (owner[:, None] == np.arange(len(costs))).cumsum(0)])
    sizes = np.where(counts == dense, dense, np.maximum(counts // step * step, least))
    unit = np.array([cost.at([(size,)])[0] / size for cost, size in zip(costs, dense, strict=True)])
    score = np.zeros(len(sizes))
    for each, size in zip(falling, sizes.T, strict=True):
        score += np.concatenate([[0.0], each.cumsum()])[size.astype(int)]
    return Descent(tuple(cost.block for cost in costs), sizes, sizes @ unit, score)


def highest_scores(budget: Budget, scores: tuple[Scores, ...]) -> tuple[tuple[Sizes, ...], float]:
    """(the sizes within the budget whose units have the largest sum of scores, that sum).

    For every number of heads, the ones that score highest in all blocks; then as many channels, by score as well, as
    the rest of the budget allows.
    """
    heads, channels = descent(budget, scores, "heads"), descent(budget, scores, "mlp")
    taken = np.searchsorted(channels.cost, budget.limit - heads.cost + ROUNDING, side="right") - 1
    total = np.where(taken < 0, -np.inf, heads.score + channels.score[taken])
    best = int(total.argmax())
    assert taken[best] >= 0, "make_budget has seen that the smallest sizes fit"
    sizes = list(budget.base)
    for found, group, row in ((heads, "heads", best), (channels, "mlp", taken[best])):
        for block, size in zip(found.blocks, found.sizes[row], strict=True):
            sizes[block] = replace(sizes[block], **{group: int(size)})
    return tuple(sizes), float(total[best])


def with_tokens(budget: Budget, scores: tuple[Scores, ...]) -> tuple[tuple[Sizes, ...], tuple[int, ...]]:
    """(sizes, tokens that every block merges) of the largest sum of scores within the budget, tokens' included.

    Of patches too, those stay that score highest in all blocks: for every of some numbers of them, what is left of the
    budget goes to heads and channels. A block cannot have more than the one before it, and merging chooses which.
    """
    assert budget.token_costs is not None
    costs, every = budget.token_costs, [each.tokens for each in scores[:-1]]
    falling = np.stack([-np.sort(-tokens.cpu().double().numpy()) for tokens in every if tokens is not None])
    patches, ordered = falling.shape[1], np.sort(falling.flatten())
    sums = np.concatenate([np.zeros((len(falling), 1)), falling.cumsum(1)], 1)
    least = patches - sum(costs.most())
    ways = {(0,) * len(scores): float(sums[:, -1].sum())}
    for price in ordered[np.linspace(0, len(ordered) - 1, SCHEDULES).astype(int)]:
        kept = np.minimum.accumulate(np.maximum((falling >= price).sum(1), least))
        merge = (*(-np.diff(kept, prepend=patches)).tolist(), 0)
        ways[merge] = float(np.take_along_axis(sums, kept[:, None], 1).sum())
    ways.setdefault(costs.most(), float(sums[:, least].sum()))
    found = []
    for merge, of_tokens in ways.items():
        merging = budget.merging(merge)
        if merging.least <= merging.limit:
            sizes, total = highest_scores(merging, scores)
            found.append((total + of_tokens, sizes, merge))
    _, sizes, merge = max(found, key=lambda way: way[0])
    return sizes, merge if any(merge) else ()
