"""`sparsity.latency`: what the sublayers of a model cost in time, measured on this device, batch and dtype."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corp_cli.config.prune import SparsityConfig
from corp_cli.linalg.merging import merge_tokens
from corp_cli.measure.timing import pass_seconds
from corp_cli.models.adapter import put_module, resize_attention, resize_mlp
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


def latency_budget(
    dense: LoadedModel, cfg: SparsityConfig, base: tuple[Sizes, ...], updated_tokens: int | None, merges: bool
) -> Budget:
    """The budget of `sparsity.latency`: a fraction of the dense model's forward pass to remove, in seconds.

    merges: whether tokens may be merged for it. The time of a model is taken as what no size changes, plus the sum over
    its sublayers, scaled to what they take within the dense one: between two timings a machine's speed drifts. Raises
    CorpError where the smallest sizes take too long.
    """
    dtype = getattr(torch, cfg.latency_dtype)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(cfg.latency_batch_size, *dense.spec.data["input_size"], generator=generator)
    images = images.to(dense.device, dtype)
    model = copy.deepcopy(dense.model).to(dtype)
    stream = torch.randn_like(tokens(model, images))
    free = free_groups(dense.blocks, base)
    timed = [block.mlp if group == "mlp" else block.attn for block, group in ((dense.blocks[i], g) for i, g in free)]
    of_dense, of_plain, fixed = ranks.once(whole_seconds, model, images, timed)
    costs, whole, known = [], 0.0, {}
    for i, block in enumerate(console.track(dense.blocks, "latency", len(dense.blocks))):
        updated = updated_tokens if i == len(dense.blocks) - 1 else None
        for groups in (("mlp",), ("qk", "vo")):
            allowed = tuple(group for group in groups if (i, group) in free)
            if not allowed:
                continue
            key = base[i], block.sizes, allowed, updated
            if key not in known:
                known[key] = ranks.once(time_sublayer, model, block, base[i], allowed, updated, stream)
            axes, values, whole_sublayer = known[key]
            costs.append(Cost(i, allowed, axes, values))
            whole += whole_sublayer
    assert cfg.latency is not None
    scale = max(of_plain - fixed, 0.0) / max(whole, 1e-300)
    scaled = tuple(replace(cost, values=scale * cost.values) for cost in costs)
    by_token = token_seconds(model, dense.blocks, base, updated_tokens, stream, scale) if merges else None
    found = Budget("latency", cfg.latency, of_dense, fixed, base, scaled, cfg.round_to, updated_tokens, by_token)
    return replace(found, device=dense.device.type).require_met()


def whole_seconds(model: nn.Module, images: Tensor, sublayers: list[str]) -> tuple[float, float, float]:
    """Seconds of a pass of `model`, of it built as pruned models are, and of that without `sublayers` (their paths).

    Pruned models have plain blocks, and no LayerScale.
    """
    plain = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})  # which it shares
    fold_layer_scale(plain)
    put_plain_blocks(plain)
    rest = copy.deepcopy(plain, {id(tensor): tensor for tensor in plain.parameters()})
    for path in sublayers:
        put_module(rest, path, Passing())
    seconds = pass_seconds({"dense": model, "plain": plain, "rest": rest}, images, PASSES, 3 * MAX_SECONDS)
    return median(seconds["dense"]), median(seconds["plain"]), median(seconds["rest"])


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
    scale: float,
) -> TokenCosts:
    """Seconds, times `scale`, of attention, MLP and merging by the tokens of `stream` [B, N, D] that they see."""
    whole, prefix = stream.shape[1], prefix_tokens(model)
    seen = sorted({max(prefix + 2, round(whole * share)) for share in SHARES})

    def timed(module: nn.Module, counts: list[int]) -> Floats:
        return ranks.once(seconds, module, counts)

    def seconds(module: nn.Module, counts: list[int]) -> Floats:
        found = [median(pass_seconds({"": module}, stream[:, :n], PASSES, MAX_SECONDS)[""]) for n in counts]
        return scale * np.interp(np.arange(whole + 1), counts, found)

    attn: list[Floats] = []
    mlp: list[Floats] = []
    known: dict[tuple[Sizes, Sizes, int | None], tuple[Floats, Floats]] = {}
    for i, block in enumerate(console.track(blocks, "latency by tokens", len(blocks))):
        updated = updated_tokens if i == len(blocks) - 1 else None
        key = base[i], block.sizes, updated
        if key not in known:
            of_attn, of_mlp = (resized(model, block, base[i], path, updated) for path in (block.attn, block.mlp))
            known[key] = timed(of_attn, seen), timed(of_mlp, seen if updated is None else [updated])
        attn.append(known[key][0])
        mlp.append(known[key][1])
    merging = timed(Merging(prefix, base[0].qk), seen)
    return TokenCosts(np.stack(attn), np.stack(mlp), prefix, lambda n, count: float(merging[n]))


class Merging(nn.Module):
    """What a block does that merges an eighth of its tokens, for the clock."""

    def __init__(self, prefix: int, key_width: int) -> None:
        super().__init__()
        self.prefix, self.key_width = prefix, key_width

    def forward(self, x: Tensor) -> Tensor:
        """x [B, N, D] → [B, N - N / 8, D]."""
        keys, sizes = x[..., : self.key_width], torch.ones_like(x[..., :1])
        return merge_tokens(x, keys, sizes, self.prefix, x.shape[1] // 8)[0]


def time_sublayer(
    model: nn.Module, block: Block, base: Sizes, groups: tuple[str, ...], updated: int | None, stream: Tensor
) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, float]:
    """(sizes per group, seconds on their grid, seconds of the dense sublayer) of the attention or MLP of a block.

    updated: how many leading tokens of `stream` the block updates; None: all.
    """
    axes = tuple(grid(getattr(base, group), POINTS[group]) for group in groups)
    path = block.mlp if groups == ("mlp",) else block.attn
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
    """The attention or MLP at `path`, as it would be at `sizes`, with random weights."""
    holder = nn.Module()
    holder.add_module("part", copy.deepcopy(model.get_submodule(path)))
    alone = replace(block, attn="part", mlp="part")
    if path == block.mlp:
        return resize_mlp(holder, alone, sizes.mlp, True)
    attn = resize_attention(holder, alone, AttentionSizes(sizes.heads, sizes.qk, sizes.vo, block.scale, True, True))
    attn.updated_tokens = updated
    return attn
