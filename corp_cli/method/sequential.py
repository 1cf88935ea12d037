"""Stage 3, sequential: compensate block by block on the stream that the blocks before, already cut, really produce.

One-shot compensation takes every block's inputs from the dense model. Here each block is calibrated, ranked and
compensated on the *pruned* stream x̂, and the last linear layer of each branch is refitted towards

    f(x̂) + α (f(x) - f(x̂)) + β (x - x̂),

f the dense branch and x the dense stream: it answers to its own inputs, and undoes a part of what went wrong before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, RankerConfig
from corp_cli.linalg.moments import Moments, select_moments
from corp_cli.linalg.ridge import refit
from corp_cli.method.calibrate import require_finite
from corp_cli.method.compensate import Errors, GroupError, compensate_mlp, compensate_qk, compensate_vo, only_heads
from corp_cli.method.fit_mlp import fit_block
from corp_cli.method.fit_values import fit_values
from corp_cli.method.keep import KeptAttention, keep
from corp_cli.method.observe import Joint, joint_moments, observe, observe_attention, observe_cut, with_ridge
from corp_cli.method.rank import RankerArgs, rank_block
from corp_cli.method.sample import Sample, sampled
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import Stream, advance_dense, advance_merging, advance_pruned, enter_block, start_streams
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import AttentionWeights, Block, Sizes
from corp_cli.models.offload import visit
from corp_cli.models.streams import sublayers
from corp_cli.runtime import console
from corp_cli.runtime.scratch import Keep, on_host


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
    keep_tokens: Keep = on_host,
) -> tuple[nn.Module, Errors]:
    """A copy of `dense` cut to `sizes`, each block ranked and compensated on the stream of those before it.

    That stream merges merge[i] tokens in block i (none: an empty tuple); the copy does not yet. Blocks that `progress`
    holds are taken from it, and others are added to it; tokens wait where `keep_tokens` puts them.
    """
    pruned = copy.deepcopy(dense)
    seed = args.generator.initial_seed()
    stream = start_streams(dense, blocks, batches, cfg, seed, keep_tokens)
    images = sum(map(len, stream.dense))
    every: list[dict[str, GroupError]] = []
    for i, block in enumerate(console.track(visit(blocks, dense, pruned), "compensate", len(blocks))):
        enter_block(stream, dense, block)
        args = replace(args, block=i)
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
            joint = joint_moments(stream, cut, observe_cut(stream, cut, targets))
            require_finite(block, BlockStatistics(head_output=joint.every))
            how = with_ridge(attn.proj.flatten(1), joint, cfg)
            attn = refit_attention(stream, pruned, block, attn, joint, kept, targets, how, seed + i, errors)
            replace_attention(pruned, block, attn)
            del statistics, targets, joint, attn, cut  # there may be no room for both halves of a block at a time
            weights = replace(weights, attn=None)
        else:
            advance_dense(stream, attention)
        if merge and merge[i] > 0:
            advance_merging(stream, sublayers(pruned, block)[0], pruned, block, merge[i])
        else:
            advance_pruned(stream, sublayers(pruned, block)[0])

        if known is None and weights.mlp is not None:
            fits = cfg.mlp == "gauss_newton" and images > 1 and sizes[i].mlp < block.sizes.mlp
            sample = Sample(cfg.fit_tokens, seed + i, stream.keep) if fits else None
            joint = joint_moments(stream, mlp, sampled(observe(stream, mlp, cfg), images, sample))
            require_finite(block, BlockStatistics(hidden=joint.every))
            how = with_ridge(weights.mlp.fc2, joint, cfg)
            moments = joint.fitted if sample else joint.every
            fc2, bias = refit(weights.mlp.fc2, moments, how.ridge)
            refitted = replace(weights.mlp, fc2=fc2, fc2_bias=bias)
            hidden = select_moments(moments, torch.arange(mlp.output.in_features, device=moments.mean.device))
            del joint, moments  # they are the largest tensors of the run
            found, by_mlp = BlockStatistics(hidden=hidden), replace(weights, mlp=refitted)
            known_size = replace(args, kept=sizes[i], ridge_lambda=how.ridge)
            units = keep(rank_block(by_mlp, found, block, groups & {"mlp"}, ranker, known_size), block, sizes[i]).mlp
            if units is not None:
                refitted, errors["mlp"] = compensate_mlp(refitted, hidden, units, how)
            replace_mlp(pruned, block, refitted)
            del hidden, found, by_mlp
            if sample and units is not None:
                fit = fit_block(stream, pruned, block, refitted, sample, how)
                errors["mlp"] = replace(errors["mlp"], fits=(fit,))
        else:
            advance_dense(stream, mlp)
        advance_pruned(stream, sublayers(pruned, block)[1])

        if known is None and progress:
            progress.write(i, block, pruned, dense, errors)
        every.append(errors)
    return pruned.eval(), tuple(every)


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


def refit_attention(
    stream: Stream,
    pruned: nn.Module,
    block: Block,
    attn: AttentionWeights,
    joint: Joint,
    kept: KeptAttention | None,
    targets: list[Tensor],
    cfg: CompensationConfig,
    seed: int,
    errors: dict[str, GroupError],
) -> AttentionWeights:
    """`attn` with proj refitted to what it should give; values go, and are refitted with it. Adds to `errors`."""
    whole = with_proj(attn, joint.every, cfg)
    if kept is None or kept.vo.shape[1] == attn.v.shape[1]:
        return whole
    cut, errors["vo"] = cut_values(whole, joint.every, kept, cfg)
    if cfg.vo != "reduced_rank" or joint.aside is None:
        return cut
    whole = with_proj(attn, joint.fitted, cfg)
    begun, _ = cut_values(whole, joint.fitted, kept, cfg)
    fitted, fits = fit_values(stream, pruned, block, begun, whole, targets, cfg, seed)
    errors["vo"] = replace(errors["vo"], fits=fits)
    return fitted if any(fit.rounds for fit in fits) else cut


def with_proj(attn: AttentionWeights, moments: Moments, cfg: CompensationConfig) -> AttentionWeights:
    """`attn` with proj refitted on `moments` of the head outputs and its target."""
    proj, bias = refit(attn.proj.flatten(1), moments, cfg.ridge)
    return replace(attn, proj=proj.reshape(attn.proj.shape), proj_bias=bias)


def cut_values(
    attn: AttentionWeights, moments: Moments, kept: KeptAttention, cfg: CompensationConfig
) -> tuple[AttentionWeights, GroupError]:
    """`attn` without the values that go, by `moments` of the head outputs and its target."""
    inputs = select_moments(moments, torch.arange(attn.proj[0].numel(), device=moments.mean.device))
    every = torch.arange(len(kept.heads), device=attn.proj.device)
    return compensate_vo(attn, inputs, every, kept.vo.to(attn.proj.device), cfg)
