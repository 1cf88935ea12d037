"""Schedules of token merging: how many tokens to merge in which block, by measured damage against what they cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from corp_cli.sizes.costs import Floats, TokenCosts

STEPS = 128  # counts of merged tokens that are looked at, about
PRICES = np.geomspace(1e-3, 30, 24)  # nats per image that the cost of the whole dense model may be worth


def schedules(damage: list[Tensor], costs: TokenCosts) -> list[tuple[tuple[int, ...], float]]:
    """[(tokens merged in every block, predicted damage)], from none to all: the best for every of some prices of cost.

    damage[i] [N + 1] is what merging in block i alone does, by the tokens that stay; the last block merges none. To
    merge more, in block i, of a stream that has fewer tokens already is taken to cost what the curve of block i rises
    on the way: Σ_i f_i(n_i) - f_i(n_{i-1}), which a shortest path over (block, tokens) makes smallest together with
    price · cost.
    """
    most = sum(costs.most())
    steps = costs.tokens - np.unique(np.linspace(0, most, min(most, STEPS) + 1).round().astype(int))
    curves = np.stack([f.numpy()[steps] for f in damage])
    whole = float(costs.attn[:, -1].sum() + costs.mlp[:, -1].sum())
    attn, mlp = costs.attn[:, steps] / whole, costs.mlp[:, steps] / whole
    merging = np.array([[costs.merging(a, a - b) if b < a else 0.0 for b in steps] for a in steps]) / whole
    found: dict[tuple[int, ...], float] = {(0,) * len(attn): 0.0}
    for price in PRICES:
        path = shortest_path(curves, price * attn, price * mlp, price * merging)
        behind = np.array([0, *path])
        hurt = sum(float(f[b] - f[a]) for f, a, b in zip(curves, behind[:-1], behind[1:], strict=False))
        merge = *np.diff(-steps[behind]).tolist(), 0
        found[merge] = hurt
    found.setdefault(costs.most(), float(damage[0][costs.tokens - most]))  # a budget is only known to be met with it
    return list(found.items())


def shortest_path(curves: Floats, attn: Floats, mlp: Floats, merging: Floats) -> list[int]:
    """The index of the tokens that stay behind every block but the last, on the way that costs least.

    curves [L - 1, S], attn and mlp [L, S], merging [S before, S behind] by the index of the tokens, most first.
    """
    length = np.full(curves.shape[1], np.inf)
    length[0] = 0.0
    came: list[NDArray[np.int64]] = []
    fewer = np.tril(np.ones((len(length),) * 2, dtype=bool)).T  # [before, behind]: tokens never come back
    for f, of_attn, of_mlp in zip(curves, attn[:-1], mlp[:-1], strict=True):
        through = (length + of_attn - f)[:, None] + (f + of_mlp)[None] + merging
        through = np.where(fewer, through, np.inf)
        came.append(through.argmin(0))
        length = through.min(0)
    at = int((length + attn[-1] + mlp[-1]).argmin())
    path = [at]
    for before in came[:0:-1]:
        at = int(before[at])
        path.append(at)
    return path[::-1]
