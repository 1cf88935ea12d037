"""What the groups of a model cost in MACs or parameters, by their sizes and by how many tokens a block sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from corp_cli.config.prune import SEARCHES
from corp_cli.measure.macs import count_module
from corp_cli.measure.results import Count
from corp_cli.models.blocks import Block, Sizes
from corp_cli.models.counts import count, sized_skeleton
from corp_cli.models.spec import AttentionSizes, MlpSizes, ModelSpec, PrunedSizes
from corp_cli.models.streams import tokens
from corp_cli.models.token_block import LEAST_TOKENS, prefix_tokens

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """Cost of the sizes of some groups of one block: `values` on a grid of sizes, linear between its points."""

    block: int
    groups: tuple[str, ...]
    axes: tuple[tuple[int, ...], ...]  # per group, ascending
    values: Floats  # one axis per group

    def at(self, sizes: Iterable[tuple[int, ...]]) -> tuple[float, ...]:
        """The cost of every choice of sizes."""
        from scipy.interpolate import RegularGridInterpolator  # here, since scipy takes long to import

        found = RegularGridInterpolator(self.axes, self.values, bounds_error=False, fill_value=None)(list(sizes))
        return tuple(float(value) for value in found)


@dataclass(frozen=True)
class TokenCosts:
    """What the attention and the MLP of every block cost at n = 0..N tokens, [L, N + 1], in the budget's unit.

    They are of the sizes that a budget starts from. prefix: how many leading tokens are never merged. merging(n, m):
    what it costs itself to merge m of n tokens.
    """

    attn: Floats
    mlp: Floats
    prefix: int
    merging: Callable[[int, int], float]

    @property
    def tokens(self) -> int:
        """N, at the first block."""
        return self.attn.shape[1] - 1

    def most(self) -> tuple[int, ...]:
        """The schedule that merges as much as is allowed, at once."""
        count = int((1 - LEAST_TOKENS) * (self.tokens - self.prefix))
        return (count, *(0 for _ in self.attn[1:]))

    def of_merging(self, merge: tuple[int, ...]) -> float:
        """What merging itself costs."""
        ahead = self.tokens - np.cumsum([0, *merge[:-1]])
        return sum(self.merging(int(n), m) for n, m in zip(ahead, merge, strict=True) if m > 0)

    def by_block(self, merge: tuple[int, ...]) -> Iterator[tuple[int, tuple[float, float], tuple[float, float]]]:
        """(block, shares of their cost that attention and MLP have left, that cost) for a schedule."""
        behind = self.tokens - np.cumsum([0, *merge])
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp, strict=True)):
            whole = float(attn[-1]), float(mlp[-1])
            yield i, (float(attn[behind[i]]) / whole[0], float(mlp[behind[i + 1]]) / whole[1]), whole


def cost_of(
    spec: ModelSpec,
    blocks: tuple[Block, ...],
    sizes: tuple[Sizes, ...],
    kind: str,
    updated_tokens: int | None = None,
    merge: tuple[int, ...] = (),
) -> int:
    """MACs of one image, or parameters, of a model pruned to these sizes; `updated_tokens`, `merge`: see Budget."""
    return of_kind(count(spec, pruned_blocks(blocks, sizes, updated_tokens, merge)), kind)


def dense_cost(spec: ModelSpec, kind: str) -> int:
    """MACs of one image, or parameters, of the model as it is."""
    return of_kind(count(spec, {}), kind)


def of_kind(found: Count, kind: str) -> int:
    """Its MACs, or its parameters."""
    return found.macs if kind == "macs" else found.parameters


def pruned_blocks(
    blocks: tuple[Block, ...], sizes: tuple[Sizes, ...], updated_tokens: int | None = None, merge: tuple[int, ...] = ()
) -> dict[str, PrunedSizes]:
    """block name → what it is built from at these sizes."""
    pruned = {}
    for i, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        attn = AttentionSizes(size.heads, size.qk, size.vo, block.scale, True, True) if block.sizes.heads > 0 else None
        mlp = MlpSizes(size.mlp, True) if block.sizes.mlp > 0 else None
        updated = updated_tokens if i == len(blocks) - 1 else None
        pruned[block.name] = PrunedSizes(attn, mlp, updated, merge[i] if any(merge[: i + 1]) else None, True)
    return pruned


def free_groups(
    blocks: tuple[Block, ...], base: tuple[Sizes, ...], groups: tuple[str, ...] = SEARCHES["damage"]
) -> list[tuple[int, str]]:
    """Every (block, group) of `groups` that a budget may cut below `base`."""
    return [
        (i, group)
        for i, sizes in enumerate(base)
        for group in groups
        if group not in blocks[i].refusals and getattr(sizes, group) > 1
    ]


def linear_costs(
    spec: ModelSpec,
    blocks: tuple[Block, ...],
    base: tuple[Sizes, ...],
    kind: str,
    updated_tokens: int | None = None,
    groups: tuple[str, ...] = SEARCHES["damage"],
) -> tuple[Cost, ...]:
    """The cost of every group of every block. MACs and parameters are linear in every size."""
    costs: list[Cost] = []
    known: dict[tuple[str, Sizes, str, bool], float] = {}
    whole = cost_of(spec, blocks, base, kind, updated_tokens)
    for i, group in free_groups(blocks, base, groups):
        size = getattr(base[i], group)
        key = blocks[i].place, base[i], group, i == len(base) - 1
        if key not in known:
            smaller = list(base)
            smaller[i] = replace(base[i], **{group: size // 2})
            cut = cost_of(spec, blocks, tuple(smaller), kind, updated_tokens)
            known[key] = (whole - cut) / (size - size // 2)
        costs.append(Cost(i, (group,), ((0, size),), np.array([0.0, known[key] * size])))
    return tuple(costs)


def mac_costs(
    spec: ModelSpec, blocks: tuple[Block, ...], base: tuple[Sizes, ...], updated_tokens: int | None
) -> TokenCosts:
    """MACs of one image by tokens, counted on the meta device; the last block updates some of them (None: all).

    Attention is quadratic in the tokens, the MLP linear; that of a last block that updates some sees only those.
    """
    model = sized_skeleton(spec, pruned_blocks(blocks, base, updated_tokens))
    stream = tokens(model, torch.empty(1, *spec.data["input_size"], device="meta"))
    whole, width = stream.shape[1:]
    points = whole, whole // 2, whole // 4

    def by_tokens(path: str) -> Floats:
        counts = [count_module(model.get_submodule(path), stream[:, :n]) for n in points]
        return np.polynomial.Polynomial.fit(points, counts, 2)(np.arange(whole + 1))

    attn = np.stack([by_tokens(block.attn) for block in blocks])
    mlp = np.stack([by_tokens(block.mlp) for block in blocks])
    if updated_tokens is not None:
        mlp[-1] = count_module(model.get_submodule(blocks[-1].mlp), stream[:, :updated_tokens])
    prefix = prefix_tokens(model)
    return TokenCosts(attn, mlp, prefix, lambda n, m: merging_macs(n - prefix, m, width, base[0].qk))


def merging_macs(tokens: int, count: int, width: int, key_width: int) -> float:
    """MACs of merge_tokens: similarities of all pairs, and the sum of what is merged, in as many turns as it takes."""
    macs = 0
    while count > 0:
        at_once, others = min(count, tokens // 2), tokens // 2
        macs += others * ((tokens - others) * key_width + at_once * (width + key_width + 1))
        tokens, count = tokens - at_once, count - at_once
    return float(macs)
