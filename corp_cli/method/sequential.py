"""Stage 3, sequential: compensate block by block on the stream that the blocks before, already cut, really produce.

One-shot compensation takes every block's inputs from the dense model. Here each block is calibrated, ranked and
compensated on the *pruned* stream x̂, and the last linear layer of each branch is refitted towards

    f(x̂) + α (f(x) - f(x̂)) + β (x - x̂),

f the dense branch and x the dense stream: it answers to its own inputs, and undoes a part of what went wrong before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, RankerConfig
from corp_cli.linalg.moments import Moments, RunningMoments, select_moments
from corp_cli.linalg.ridge import refit
from corp_cli.method.calibrate import RunningLogits, accumulation_device, require_finite
from corp_cli.method.compensate import Errors, GroupError, compensate_mlp, compensate_qk, compensate_vo, only_heads
from corp_cli.method.keep import KeptAttention, keep
from corp_cli.method.rank import RankerArgs, rank_block
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import (
    Batch,
    Stream,
    advance_dense,
    advance_merging,
    advance_pruned,
    enter_block,
    start_streams,
    token_weights,
)
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import AttentionWeights, Block, Sizes
from corp_cli.models.kinds import rows_of
from corp_cli.models.streams import input_of, sublayers
from corp_cli.models.sublayers import Sublayer
from corp_cli.runtime import console


class Progress(Protocol):
    """Where blocks that are done are kept for a run that goes on."""

    def read(self, index: int, block: Block, pruned: nn.Module) -> dict[str, GroupError] | None:
        """Put a kept block into `pruned` and give its errors; None where none is kept."""

    def write(
        self, index: int, block: Block, pruned: nn.Module, dense: nn.Module, errors: dict[str, GroupError]
    ) -> None:
        """Keep a block of `pruned`."""


@torch.no_grad()  # not inference_mode: the parameters made here are the user's, to train further
def compensate_sequentially(
    dense: nn.Module,
    blocks: tuple[Block, ...],
    sizes: tuple[Sizes, ...],
    merge: tuple[int, ...],
    groups: frozenset[str],
    batches: Iterable[Tensor],
    ranker: RankerConfig,
    cfg: CompensationConfig,
    args: RankerArgs,
    progress: Progress | None = None,
) -> tuple[nn.Module, Errors]:
    """A copy of `dense` cut to `sizes`, each block ranked and compensated on the stream of those before it.

    That stream merges merge[i] tokens in block i (none: an empty tuple); the copy does not yet. Blocks that `progress`
    holds are taken from it, and others are added to it.
    """
    pruned = copy.deepcopy(dense)
    stream = start_streams(dense, blocks, batches, cfg)
    every: list[dict[str, GroupError]] = []
    for i, block in enumerate(console.track(blocks, "compensate", len(blocks))):
        enter_block(stream, dense, block)
        attention, mlp = sublayers(dense, block)
        weights = block_weights(dense, block)
        known = progress.read(i, block, pruned) if progress else None
        errors = known or {}

        if known is None and weights.attn is not None:
            statistics, targets = observe_attention(stream, dense, block, attention, cfg)
            require_finite(block, statistics)
            scores = rank_block(weights, statistics, block, groups - {"mlp"}, ranker, args)
            kept = keep(scores, block, sizes[i]).attn
            attn = cut_logits(weights.attn, statistics, block, kept, cfg, errors)
            replace_attention(pruned, block, attn)
            cut = sublayers(pruned, block)[0]
            moments = joint_moments(stream, cut, observe_cut(stream, cut, targets))
            require_finite(block, BlockStatistics(head_output=moments))
            replace_attention(pruned, block, refit_proj(attn, moments, kept, cfg, errors))
        else:
            advance_dense(stream, attention)
        if merge and merge[i] > 0:
            advance_merging(stream, sublayers(pruned, block)[0], pruned, block, merge[i])
        else:
            advance_pruned(stream, sublayers(pruned, block)[0])

        if known is None and weights.mlp is not None:
            moments = observe_mlp(stream, mlp, cfg)
            require_finite(block, BlockStatistics(hidden=moments))
            fc2, bias = refit(weights.mlp.fc2, moments, cfg.ridge_lambda)
            refitted = replace(weights.mlp, fc2=fc2, fc2_bias=bias)
            hidden = select_moments(moments, torch.arange(mlp.output.in_features, device=moments.mean.device))
            found, by_mlp = BlockStatistics(hidden=hidden), replace(weights, mlp=refitted)
            known_size = replace(args, kept=sizes[i])
            units = keep(rank_block(by_mlp, found, block, groups & {"mlp"}, ranker, known_size), block, sizes[i]).mlp
            if units is not None:
                refitted, errors["mlp"] = compensate_mlp(refitted, hidden, units, cfg)
            replace_mlp(pruned, block, refitted)
        else:
            advance_dense(stream, mlp)
        advance_pruned(stream, sublayers(pruned, block)[1])

        if known is None and progress:
            progress.write(i, block, pruned, dense, errors)
        every.append(errors)
    return pruned.eval(), tuple(every)


# --- observe --------------------------------------------------------------------------------------------------


def target(branch: Sublayer, batch: Batch, dense: Tensor, own: Tensor, cfg: CompensationConfig) -> Tensor:
    """What `branch.output` should give on x̂: own + α (dense - own) + β (x - x̂) / gain, in the order of own.

    dense and own are what the dense branch gives on x and on x̂; where x̂ has merged tokens, dense and x are means over
    those that a token stands for. β acts on the stream, so it is divided by what
    multiplies the output on its way there; where that is no elementwise scale (a norm), β is left out.
    """
    y = own + cfg.alpha * (batch.pooled(dense) - own)
    if branch.gain is None:
        return y
    return y + cfg.beta * branch.split(batch.pooled(batch.x) - batch.x_hat) * inverse_gain(branch.gain)


def inverse_gain(gain: Tensor | float) -> Tensor | float:
    """1 / gain, zero for channels that (almost) do not reach the stream."""
    if isinstance(gain, float):
        return 1 / gain
    reaches = gain.abs() > 1e-3 * gain.abs().max()
    return torch.where(reaches, 1 / gain.where(reaches, torch.ones_like(gain)), 0.0)


@dataclass(frozen=True)
class Seen:
    """A branch on one batch of x̂: what goes into its last layer, what should come out, how often tokens count."""

    inputs: Tensor
    target: Tensor
    weights: Tensor


def observe(stream: Stream, branch: Sublayer, cfg: CompensationConfig) -> Iterator[Seen]:
    """The dense branch on every batch of x̂; meanwhile x advances past it."""
    for batch in stream.batches():
        on_dense = branch.branch(batch.x)
        with input_of(branch.output) as inputs:
            own = branch.branch(batch.x_hat, batch.sizes)
        yield Seen(inputs[0], target(branch, batch, on_dense, own, cfg), token_weights(stream, batch, branch))
        stream.dense[batch.index] = branch.added(batch.x, on_dense).cpu()


def observe_attention(
    stream: Stream, dense: nn.Module, block: Block, branch: Sublayer, cfg: CompensationConfig
) -> tuple[BlockStatistics, list[Tensor]]:
    """(statistics of the dense attention on x̂, what proj should give, per batch)."""
    home = accumulation_device(stream.device)
    logits = None if "qk" in block.refusals else RunningLogits(block, home)
    outputs, targets = RunningMoments(branch.output.in_features, home), []
    with rows_of(dense.get_submodule(block.attn)) as rows:
        for seen in observe(stream, branch, cfg):
            if logits is not None:
                logits.add(rows[0], seen.weights)
            outputs.add(seen.inputs.flatten(0, -2), seen.weights.flatten())
            targets.append(seen.target.cpu())
    return BlockStatistics(logits=None if logits is None else logits.result(), head_output=outputs.result()), targets


def observe_mlp(stream: Stream, branch: Sublayer, cfg: CompensationConfig) -> Moments:
    """Moments of the hidden channels of the dense MLP on x̂ and of what fc2 should give, side by side."""
    return joint_moments(stream, branch, observe(stream, branch, cfg))


def observe_cut(stream: Stream, cut: Sublayer, targets: list[Tensor]) -> Iterator[Seen]:
    """The branch `cut` on every batch of x̂, with what it should give."""
    for batch in stream.batches():
        with input_of(cut.output) as inputs:
            cut.branch(batch.x_hat, batch.sizes)
        yield Seen(inputs[0], targets[batch.index].to(stream.device), token_weights(stream, batch, cut))


def joint_moments(stream: Stream, branch: Sublayer, every: Iterable[Seen]) -> Moments:
    """Moments of the inputs of `branch.output` and of what should come out, side by side."""
    joint = RunningMoments(branch.output.in_features + branch.output.out_features, accumulation_device(stream.device))
    for seen in every:
        pair = [seen.inputs.flatten(0, -2), seen.target.flatten(0, -2)]
        joint.add(torch.cat(pair, -1), seen.weights.flatten())
    return joint.result()


# --- cut and refit --------------------------------------------------------------------------------------------


def cut_logits(
    attn: AttentionWeights,
    statistics: BlockStatistics,
    block: Block,
    kept: KeptAttention | None,
    cfg: CompensationConfig,
    errors: dict[str, GroupError],
) -> AttentionWeights:
    """`attn` without the heads, queries and keys that go; values only lose those of the heads. Adds to `errors`."""
    if kept is None:
        return attn
    heads, qk = kept.heads.to(attn.proj.device), kept.qk.to(attn.proj.device)
    v_bias = None if attn.v_bias is None else attn.v_bias[heads]
    attn = replace(attn, v=attn.v[heads], v_bias=v_bias, proj=attn.proj[:, heads])
    if statistics.logits is None or qk.shape[1] == block.sizes.qk:
        return only_heads(attn, heads)
    attn, errors["qk"] = compensate_qk(attn, statistics.logits, heads, qk, cfg)
    return attn


def refit_proj(
    attn: AttentionWeights,
    moments: Moments,
    kept: KeptAttention | None,
    cfg: CompensationConfig,
    errors: dict[str, GroupError],
) -> AttentionWeights:
    """`attn` with proj refitted on `moments` of the head outputs and its target; then values go. Adds to `errors`."""
    proj, bias = refit(attn.proj.flatten(1), moments, cfg.ridge_lambda)
    attn = replace(attn, proj=proj.reshape(attn.proj.shape), proj_bias=bias)
    if kept is None or kept.vo.shape[1] == attn.v.shape[1]:
        return attn
    inputs = select_moments(moments, torch.arange(proj.shape[1], device=proj.device))
    every = torch.arange(len(kept.heads), device=proj.device)
    attn, errors["vo"] = compensate_vo(attn, inputs, every, kept.vo.to(proj.device), cfg)
    return attn
