"""`sparsity.latency`: what the sublayers of a model cost in time, measured on this device, batch and dtype."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corp_cli.config.prune import SparsityConfig
from corp_cli.linalg.merging import merge_tokens
from corp_cli.measure.timing import pass_seconds
from corp_cli.models.adapter import put_module, resize_attention, resize_mlp, sharing
from corp_cli.models.blocks import Block, Sizes
from corp_cli.models.layer_scale import fold_layer_scale
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.plain_block import put_plain_blocks
from corp_cli.models.spec import AttentionSizes
from corp_cli.models.streams import tokens
from corp_cli.models.token_block import prefix_tokens
from corp_cli.runtime import console, ranks
from corp_cli.sizes.budget import Budget
from corp_cli.sizes.costs import Cost, Floats, TokenCosts, free_groups

POINTS = {"mlp": 6, "qk": 4, "vo": 4}  # sizes that are timed; others are interpolated
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)  # of the tokens, at which sublayers are timed where tokens may be merged
PASSES, MAX_SECONDS = 20, 5.0  # of every module that is timed, in turns

Axes = tuple[tuple[int, ...], ...]  # per group, sizes ascending


@dataclass(frozen=True)
class Whole:
    """Seconds of a forward pass of the dense model; of it built as pruned ones are; of that without free sublayers."""

    dense: float
    plain: float
    rest: float


def latency_budget(
    dense: LoadedModel, cfg: SparsityConfig, base: tuple[Sizes, ...], updated_tokens: int | None, merges: bool
) -> Budget:
    """The budget of `sparsity.latency`: a fraction of the dense model's forward pass to remove, in seconds.

    merges: whether tokens may be merged for it. What no size changes is timed as a pass without the sublayers that may
    be cut. These are timed alone, and scaled so that all together take what they take of a whole pass: a machine's
    speed drifts between two timings. Raises CorpError where the smallest sizes take too long.
    """
    dtype = getattr(torch, cfg.latency_dtype)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(cfg.latency_batch_size, *dense.spec.data["input_size"], generator=generator)
    images = images.to(dense.device, dtype)
    model = copy.deepcopy(dense.model).to(dtype)
    stream = torch.randn_like(tokens(model, images))
    sublayers = free_sublayers(dense.blocks, base)
    paths = [path for _, path, _ in sublayers]
    whole = ranks.once(time_whole, model, images, paths)
    alone, in_all = time_sublayers(model, dense.blocks, sublayers, base, updated_tokens, stream)
    scale = max(whole.plain - whole.rest, 0.0) / in_all if sublayers else 0.0
    costs = tuple(replace(cost, values=scale * cost.values) for cost in alone)
    by_token = None
    if merges and scale > 0:
        uncut = {path: float(cost.values.flat[-1]) for path, cost in zip(paths, costs, strict=True)}
        by_token = token_seconds(model, dense.blocks, base, updated_tokens, stream, uncut, scale)
    assert cfg.latency is not None
    found = Budget("latency", cfg.latency, whole.dense, whole.rest, base, costs, cfg.round_to, updated_tokens, by_token)
    return replace(found, device=dense.device.type).require_met()


def free_sublayers(blocks: tuple[Block, ...], base: tuple[Sizes, ...]) -> list[tuple[int, str, tuple[str, ...]]]:
    """(block, path, groups that may be cut below `base`) of every MLP and attention that has any."""
    free = set(free_groups(blocks, base))
    found = []
    for i, block in enumerate(blocks):
        for path, groups in ((block.mlp, ("mlp",)), (block.attn, ("qk", "vo"))):
            allowed = tuple(group for group in groups if (i, group) in free)
            if allowed:
                found.append((i, path, allowed))
    return found


def time_whole(model: nn.Module, images: Tensor, sublayers: list[str]) -> Whole:
    """Passes of `model`, of it with plain blocks and no LayerScale, and of that without `sublayers`, in turns."""
    plain = sharing(model)
    fold_layer_scale(plain)
    put_plain_blocks(plain)
    rest = sharing(plain)
    for path in sublayers:
        put_module(rest, path, Passing())
    seconds = pass_seconds({"dense": model, "plain": plain, "rest": rest}, images, PASSES, 3 * MAX_SECONDS)
    return Whole(*(median(seconds[name]) for name in ("dense", "plain", "rest")))


class Passing(nn.Module):
    """A sublayer that takes no time."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """`x` itself."""
        return x


def token_seconds(
    model: nn.Module,
    blocks: tuple[Block, ...],
    base: tuple[Sizes, ...],
    updated_tokens: int | None,
    stream: Tensor,
    uncut: dict[str, float],
    scale: float,
) -> TokenCosts:
    """Seconds of attention, MLP and merging by the tokens of `stream` [B, N, D] that they see.

    uncut: path → what a sublayer takes at all tokens within the model; any other takes `scale` times what it takes.
    """
    whole, prefix = stream.shape[1], prefix_tokens(model)
    seen = sorted({max(prefix + 2, round(whole * share)) for share in SHARES})

    def timed(module: nn.Module, counts: list[int]) -> Floats:
        return ranks.once(seconds, module, counts)

    def seconds(module: nn.Module, counts: list[int]) -> Floats:
        found = [median(pass_seconds({"": module}, stream[:, :n], PASSES, MAX_SECONDS)[""]) for n in counts]
        return np.interp(np.arange(whole + 1), counts, found)

    within: dict[str, Floats] = {}
    known: dict[tuple[Sizes, Sizes, int | None, bool], Floats] = {}
    for i, block in enumerate(console.track(blocks, "latency by tokens", len(blocks))):
        updated = updated_tokens if i == len(blocks) - 1 else None
        for path in (block.attn, block.mlp):
            key = base[i], block.sizes, updated, path == block.mlp
            if key not in known:
                counts = [updated] if path == block.mlp and updated is not None else seen
                known[key] = timed(resized(model, block, base[i], path, updated), counts)
            alone = known[key]
            within[path] = alone * (uncut[path] / alone[-1] if path in uncut else scale)
    attn, mlp = (np.stack([within[getattr(block, name)] for block in blocks]) for name in ("attn", "mlp"))
    merging = scale * timed(Merging(prefix, base[0].qk), seen)
    return TokenCosts(attn, mlp, prefix, lambda n, count: float(merging[n]))


class Merging(nn.Module):
    """What a block does that merges an eighth of its tokens, for the clock."""

    def __init__(self, prefix: int, key_width: int) -> None:
        super().__init__()
        self.prefix, self.key_width = prefix, key_width

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N - N / 8, D]."""
        keys, sizes = x[..., : self.key_width], torch.ones_like(x[..., :1])
        return merge_tokens(x, keys, sizes, self.prefix, x.shape[1] // 8)[0]


def time_sublayers(
    model: nn.Module,
    blocks: tuple[Block, ...],
    sublayers: list[tuple[int, str, tuple[str, ...]]],
    base: tuple[Sizes, ...],
    updated_tokens: int | None,
    stream: Tensor,
) -> tuple[list[Cost], float]:
    """(seconds of `sublayers` by their sizes, those of all of them in the dense model), each timed alone.

    Those that are alike are timed once.
    """
    costs: list[Cost] = []
    known: dict[tuple[Sizes, Sizes, tuple[str, ...], int | None], tuple[Axes, Floats, float]] = {}
    of_dense: dict[tuple[Sizes, tuple[str, ...]], float] = {}
    in_all = 0.0
    for i, path, groups in console.track(sublayers, "latency", len(sublayers)):
        block, updated = blocks[i], updated_tokens if i == len(blocks) - 1 else None
        key = base[i], block.sizes, groups, updated
        if key not in known:
            known[key] = ranks.once(time_sublayer, model, block, base[i], path, groups, updated, stream)
        axes, values, seconds = known[key]
        costs.append(Cost(i, groups, axes, values))
        in_all += of_dense.setdefault((block.sizes, groups), seconds)  # the last block's too: it updates fewer tokens
    return costs, in_all


def time_sublayer(
    model: nn.Module,
    block: Block,
    base: Sizes,
    path: str,
    groups: tuple[str, ...],
    updated: int | None,
    stream: Tensor,
) -> tuple[Axes, Floats, float]:
    """(sizes per group, seconds on their grid, seconds of the dense sublayer) of the attention or MLP at `path`.

    updated: how many leading tokens of `stream` the block updates; None: all.
    """
    axes = tuple(grid(getattr(base, group), POINTS[group]) for group in groups)
    modules = {"dense": model.get_submodule(path)}
    for sizes in product(*axes):
        modules[str(sizes)] = resized(
            model, block, replace(base, **dict(zip(groups, sizes, strict=True))), path, updated
        )
    seconds = {}
    if groups == ("mlp",) and updated is not None:
        seconds = pass_seconds({"dense": modules.pop("dense")}, stream, PASSES, MAX_SECONDS)
        stream = stream[:, :updated]
    seconds.update(pass_seconds(modules, stream, PASSES, MAX_SECONDS))
    values = np.array([median(seconds[str(sizes)]) for sizes in product(*axes)])
    return axes, values.reshape([len(axis) for axis in axes]), median(seconds["dense"])


def grid(dense: int, points: int) -> tuple[int, ...]:
    """About `points` sizes from an eighth of `dense` up to it, ascending; from 8 on in multiples of 8."""
    sizes = {round(dense * (1 + 7 * i / (points - 1)) / 8) for i in range(points)}
    return tuple(sorted({max(1, size if size < 8 else size // 8 * 8) for size in sizes} | {dense}))


def resized(model: nn.Module, block: Block, sizes: Sizes, path: str, updated: int | None) -> nn.Module:
    """The attention or MLP at `path`, as it would be at `sizes`, with random weights, or as it is if it cannot be read.

    updated: how many leading tokens attention updates; None: all.
    """
    if (sizes.mlp if path == block.mlp else sizes.heads) == 0:
        return model.get_submodule(path)
    holder = nn.Module()
    holder.add_module("part", copy.deepcopy(model.get_submodule(path)))
    alone = replace(block, attn="part", mlp="part")
    if path == block.mlp:
        return resize_mlp(holder, alone, sizes.mlp, True)
    attn = resize_attention(holder, alone, AttentionSizes(sizes.heads, sizes.qk, sizes.vo, block.scale, True, True))
    attn.updated_tokens = updated
    return attn
