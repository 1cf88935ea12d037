"""The calibration set on its way through the blocks: dense and pruned stream, their tokens merged or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.merging import merge_tokens
from corp_cli.models.attention.maps import AttentionMaps
from corp_cli.models.blocks import Block
from corp_cli.models.streams import enter, keeps_grid, read_tokens, through, tokens
from corp_cli.models.sublayers import Sublayer
from corp_cli.models.token_block import mean_keys, prefix_tokens
from corp_cli.runtime import ranks
from corp_cli.runtime.scratch import Keep, on_host

ASIDE = 10


@dataclass
class Stream:
    """Inputs [B, N, D] or [B, H, W, D] of the block at hand, one per batch, on the host: dense x and pruned x̂.

    weights: how often each token counts at the output of each block, [L, B, N] per batch; None: every token once.
    members: in which token of x̂ [B, n, D] each of x [B, N, D] was merged, [B, N] per batch; None: none was merged yet.
    aside: which images of each batch are kept aside, [B] bool per batch: their errors choose between fits.
    device: where batches are worked on. images: how many there are in all; before: how many of them come before these,
    in the streams of other processes. keep: where batches wait. block: the index of the block at hand.
    """

    dense: list[Tensor]
    pruned: list[Tensor]
    weights: list[Tensor | None]
    members: list[Tensor | None]
    aside: list[Tensor]
    device: torch.device
    images: int
    before: int
    keep: Keep = on_host
    block: int = -1

    def batches(self) -> Iterator[Batch]:
        """Every batch, on the device."""
        for i, (x, x_hat, members) in enumerate(zip(self.dense, self.pruned, self.members, strict=True)):
            same, x = x is x_hat, x.to(self.device)
            x_hat = x if same else x_hat.to(self.device)
            if members is None:
                yield Batch(i, x, x_hat)
            else:
                belongs = torch.nn.functional.one_hot(members.to(self.device).long(), x_hat.shape[1]).mT.to(x)
                sizes = belongs.sum(-1, keepdim=True)
                yield Batch(i, x, x_hat, belongs / sizes, sizes)


@dataclass(frozen=True)
class Batch:
    """One batch of a stream, on the device; `mean` [B, n, N] takes x to the means over merged tokens, None: x as it is.

    sizes [B, n, 1]: how many tokens each of x̂ stands for; None: one.
    """

    index: int
    x: Tensor
    x_hat: Tensor
    mean: Tensor | None = None
    sizes: Tensor | None = None

    def pooled(self, of_dense: Tensor) -> Tensor:
        """Something [B, N, ...] of the tokens of x → [B, n, ...]: its mean over those that were merged."""
        return of_dense if self.mean is None else self.mean @ of_dense


def start_streams(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batches: Iterable[Tensor],
    cfg: CompensationConfig,
    seed: int = 0,
    keep: Keep = on_host,
    known: Tensor | None = None,
) -> Stream:
    """The input of the first block, and the weights of its tokens, for every batch of images.

    Where tokens keep a grid, every token counts once: no head reads single ones. `seed` says which images are kept
    aside, where `cfg` has use for them. known: the weights [L, images, N] where they were found before.
    """
    found: list[Tensor] = []
    weights: list[Tensor | None] = []
    for images in batches:
        x = tokens(model, images)
        found.append(keep(x))
        if known is not None:
            begin = sum(map(len, found)) - len(x)
            weights.append(known[:, begin : begin + len(x)])
        else:
            sequence = x.ndim == 3
            weights.append(TOKEN_WEIGHTS[cfg.token_weights](model, blocks, x, cfg).cpu() if sequence else None)
    sizes = [len(x) for x in found]
    own, counts = sum(sizes), ranks.gathered(sum(sizes))
    count, before = sum(counts), sum(counts[: ranks.rank()])
    chooses = cfg.mlp == "gauss_newton" or cfg.vo == "reduced_rank" or cfg.ridge_lambda is None
    aside = kept_aside(count, seed) if chooses else torch.zeros(count, dtype=torch.bool)
    aside = aside[before : before + own]
    device = next(model.parameters()).device
    members: list[Tensor | None] = [None] * len(found)
    return Stream(found, list(found), weights, members, list(aside.split(sizes)), device, count, before, keep)


def kept_aside(count: int, seed: int) -> Tensor:
    """One in `ASIDE` of `count` images, [count] bool; none of one."""
    chosen = torch.zeros(count, dtype=torch.bool)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    chosen[order[: max(1, count // ASIDE) if count > 1 else 0]] = True
    return chosen


# --- on its way -----------------------------------------------------------------------------------------------


def enter_block(stream: Stream, dense: nn.Module, block: Block) -> None:
    """Both streams become the input of `block`, the next one."""
    stream.block += 1
    for batch in stream.batches():
        both = (stream.keep(enter(dense, block, t)) for t in (batch.x, batch.x_hat))
        stream.dense[batch.index], stream.pruned[batch.index] = both


def advance_dense(stream: Stream, branch: Sublayer) -> None:
    """x ← what comes out behind the dense branch."""
    for batch in stream.batches():
        stream.dense[batch.index] = stream.keep(branch.added(batch.x, branch.branch(batch.x)))


def advance_pruned(stream: Stream, branch: Sublayer) -> None:
    """x̂ ← what comes out behind the pruned branch."""
    for batch in stream.batches():
        x_hat = branch.added(batch.x_hat, branch.branch(batch.x_hat, batch.sizes))
        stream.pruned[batch.index] = stream.keep(x_hat)


def advance_merging(stream: Stream, branch: Sublayer, pruned: nn.Module, block: Block, count: int) -> None:
    """x̂ ← what comes out behind the pruned attention and the merging of `count` tokens, by its keys."""
    for batch in stream.batches():
        x_hat = branch.added(batch.x_hat, branch.branch(batch.x_hat, batch.sizes))
        keys = mean_keys(pruned, block, branch.pre(batch.x_hat))
        mean = torch.eye(x_hat.shape[1]).to(x_hat).expand(len(x_hat), -1, -1) if batch.mean is None else batch.mean
        sizes = x_hat.new_ones(*x_hat.shape[:2], 1) if batch.sizes is None else batch.sizes
        both, _ = merge_tokens(torch.cat([x_hat, mean], -1), keys, sizes, prefix_tokens(pruned), count)
        merged, mean = both.split([x_hat.shape[-1], mean.shape[-1]], -1)
        stream.pruned[batch.index], stream.members[batch.index] = stream.keep(merged), mean.argmax(1).short().cpu()


# --- how often each token counts ------------------------------------------------------------------------------


def token_weights(stream: Stream, batch: Batch, branch: Sublayer) -> Tensor:
    """How often each token counts that the module of a branch of this block sees of x̂; those filled up, never."""
    given = stream.weights[batch.index]
    if given is None:
        weights = batch.x_hat.new_ones(batch.x_hat.shape[:-1])
    else:
        weights = batch.pooled(given[stream.block].to(batch.x)[..., None])[..., 0]
        weights = weights if batch.sizes is None else weights * batch.sizes[..., 0]
    return branch.split(weights[..., None])[..., 0]


def uniform_weights(model: nn.Module, blocks: tuple[Block, ...], x: Tensor, cfg: CompensationConfig) -> Tensor:
    """Every token counts once."""
    return x.new_ones(len(blocks), *x.shape[:2])


def class_token_weights(model: nn.Module, blocks: tuple[Block, ...], x: Tensor, cfg: CompensationConfig) -> Tensor:
    """Tokens that the head reads count `class_token_weight` times, all others once."""
    weights = uniform_weights(model, blocks, x, cfg)
    weights[:, :, : read_tokens(model)] = cfg.class_token_weight
    return weights


def rollout_weights(model: nn.Module, blocks: tuple[Block, ...], x: Tensor, cfg: CompensationConfig) -> Tensor:
    """What the head reads of each token, by attention rollout (Abnar and Zuidema, 2020), walked backwards.

    r_L is 1 / T on the T tokens that the head reads; r_{l-1} = (r_l + r_l A_l) / 2 with A_l the attention of block l,
    mean over heads, since a branch stands beside its residual. `token_floor` of the weight is spread evenly.
    """
    rollout = Rollout(cfg.token_floor)
    with rollout.watching(model, blocks):
        for block in blocks:
            x = through(model, block, x)
    return rollout.batches[0]


def rolled_out(attentions: list[Tensor], reads: int, floor: float) -> Tensor:
    """`rollout_weights` [L, B, N] by the `attentions` [B, N, N] of all blocks and how many tokens the head reads."""
    batch, n, _ = attentions[0].shape
    reached = attentions[0].new_zeros(batch, n)
    reached[:, : reads or n] = 1 / (reads or n)
    weights = []
    for attention in reversed(attentions):
        weights.append(floor + (1 - floor) * n * reached)
        reached = (reached + (reached[:, None] @ attention)[:, 0]) / 2
    return torch.stack(weights[::-1])


def rollout_of(model: nn.Module, cfg: CompensationConfig) -> Rollout | None:
    """What takes in how much is read of every token; None where `cfg` does not ask for that, or tokens keep a grid."""
    return Rollout(cfg.token_floor) if cfg.token_weights == "rollout" and not keeps_grid(model) else None


@dataclass
class Rollout:
    """Weights [L, B, N] of the tokens of every batch, by attention rollout; see `rollout_weights`."""

    floor: float
    batches: list[Tensor] = field(default_factory=list)

    @contextmanager
    def watching(self, model: nn.Module, blocks: tuple[Block, ...]) -> Iterator[None]:
        """Add the batch that `model` is given in the body."""
        attentions: list[Tensor] = []

        def done(module: nn.Module, args: Any, out: Tensor) -> None:
            itself = torch.eye(out.shape[1], dtype=out.dtype, device=out.device)  # of an attention that is not seen
            attentions.append(maps.found[0] if len(maps.found) == 1 else itself.expand(len(out), -1, -1))
            maps.found.clear()

        with AttentionMaps() as maps, ExitStack() as hooks:
            for block in blocks:
                hooks.callback(model.get_submodule(block.name).register_forward_hook(done).remove)
            yield
        self.batches.append(rolled_out(attentions, read_tokens(model), self.floor).cpu())

    def weights(self) -> Tensor | None:
        """Those of all images, [L, images, N]; None where there are none."""
        return torch.cat(self.batches, 1) if self.batches else None


TOKEN_WEIGHTS = {"uniform": uniform_weights, "class_token": class_token_weights, "rollout": rollout_weights}
