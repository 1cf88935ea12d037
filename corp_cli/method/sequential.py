"""Stage 3, sequential: compensate block by block on the stream that the blocks before, already cut, really produce.

One-shot compensation takes every block's inputs from the dense model. Here each block is calibrated, ranked and
compensated on the *pruned* stream x̂, and the last linear layer of each branch is refitted towards

    f(x̂) + α (f(x) - f(x̂)) + β (x - x̂),

f the dense branch and x the dense stream: it answers to its own inputs, and undoes a part of what went wrong before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, RankerConfig
from corp_cli.linalg.moments import Moments, select_moments
from corp_cli.linalg.ridge import refit
from corp_cli.method.calibrate import lacks_tokens, require_finite
from corp_cli.method.compensate import Errors, GroupError, compensate_mlp, compensate_qk, compensate_vo, only_heads
from corp_cli.method.fit_mlp import fit_block
from corp_cli.method.fit_values import fit_values
from corp_cli.method.keep import KeptAttention, KeptUnits, keep
from corp_cli.method.observe import Joint, joint_moments, observe, observe_attention, observe_cut, with_ridge
from corp_cli.method.rank import RankerArgs, rank_block
from corp_cli.method.sample import Sample, sampled
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import Stream, advance_dense, advance_merging, advance_pruned, enter_block, start_streams
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import AttentionWeights, Block, BlockWeights, MlpWeights, Sizes
from corp_cli.models.offload import visit
from corp_cli.models.streams import sublayers
from corp_cli.runtime import console, ranks
from corp_cli.runtime.scratch import Keep, on_host

Repaired = tuple[KeptUnits, dict[str, GroupError]]  # of one block: its units that stay, and errors


class Progress(Protocol):
    """Where blocks that are done are kept for a run that goes on."""

    def read(self, index: int, block: Block, pruned: nn.Module) -> Repaired | None:
        """Put a kept block into `pruned` and give what came of it; None where none is kept."""

    def write(self, index: int, block: Block, pruned: nn.Module, dense: nn.Module, found: Repaired) -> None:
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
) -> tuple[nn.Module, tuple[KeptUnits, ...], Errors]:
    """A copy of `dense` cut to `sizes`, each block ranked and compensated on the stream of those before it.

    That stream merges merge[i] tokens in block i (none: an empty tuple); the copy does not yet. Blocks that `progress`
    holds are taken from it, and others are added to it; tokens wait where `keep_tokens` puts them. Of several processes
    each has a part of the stream, and one solves.
    """
    pruned = copy.deepcopy(dense)
    seed = args.generator.initial_seed()
    stream = start_streams(dense, blocks, batches, cfg, seed, keep_tokens)
    every: list[Repaired] = []
    warned = False
    for i, block in enumerate(console.track(visit(blocks, dense, pruned), "compensate", len(blocks))):
        enter_block(stream, dense, block)
        args = replace(args, block=i)
        attention, mlp = sublayers(dense, block)
        weights = block_weights(dense, block)
        known = progress.read(i, block, pruned) if progress else None
        units, errors = known or (KeptUnits(), {})

        if known is None and weights.attn is not None:
            cuts = "qk" in groups and sizes[i].qk < block.sizes.qk
            statistics, targets = observe_attention(stream, dense, block, attention, cfg, cuts)
            require_finite(block, statistics)
            if statistics.head_output and groups & {"vo", "heads"}:
                warned = warned or lacks_tokens(block, "vo", statistics.head_output.count, stream.images, cfg)
            choose = partial(chosen, block, sizes[i], groups - {"mlp"}, ranker, args)
            attn, kept, errors = ranks.once(cut_attention, weights.attn, weights, statistics, block, choose, cfg)
            replace_attention(pruned, block, attn)
            cut = sublayers(pruned, block)[0]
            joint = joint_moments(stream, cut, observe_cut(stream, cut, targets))
            require_finite(block, BlockStatistics(head_output=joint.every))
            attn, error = refit_attention(stream, pruned, block, attn, joint, kept, targets, cfg, seed + i)
            units, errors = KeptUnits(None, kept), errors | error
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
            fits = cfg.mlp == "gauss_newton" and stream.images > 1 and sizes[i].mlp < block.sizes.mlp
            sample = Sample(cfg.fit_tokens, seed + i, stream.keep) if fits else None
            joint = joint_moments(stream, mlp, sampled(stream, observe(stream, mlp, cfg), sample))
            require_finite(block, BlockStatistics(hidden=joint.every))
            if sizes[i].mlp < block.sizes.mlp:
                warned = warned or lacks_tokens(block, "mlp", joint.every.count, stream.images, cfg)
            refitted, hidden, how = ranks.once(refit_mlp, weights.mlp, joint, fits, cfg)
            del joint  # the largest tensors of the run
            known_size = replace(args, kept=sizes[i], ridge_lambda=how.ridge)
            choose = partial(chosen, block, sizes[i], groups & {"mlp"}, ranker, known_size)
            refitted, channels, error = ranks.once(cut_mlp, refitted, weights, hidden, choose, how)
            del hidden
            units, errors = replace(units, mlp=channels), errors | error
            replace_mlp(pruned, block, refitted)
            if sample and error:
                fit = fit_block(stream, pruned, block, refitted, sample, how)
                errors["mlp"] = replace(errors["mlp"], fits=(fit,))
        else:
            advance_dense(stream, mlp)
        advance_pruned(stream, sublayers(pruned, block)[1])

        if known is None and progress:
            progress.write(i, block, pruned, dense, (units, errors))
        every.append((units, errors))
    return pruned.eval(), tuple(units for units, _ in every), tuple(errors for _, errors in every)


# --- cut and refit --------------------------------------------------------------------------------------------

Choose = Callable[[BlockWeights, BlockStatistics], KeptUnits]  # `chosen`, for the block at hand


def chosen(
    block: Block,
    sizes: Sizes,
    groups: frozenset[str],
    ranker: RankerConfig,
    args: RankerArgs,
    weights: BlockWeights,
    statistics: BlockStatistics,
) -> KeptUnits:
    """Which units of `groups` a block keeps, ranked anew."""
    return keep(rank_block(weights, statistics, block, groups, ranker, args), block, sizes)


def cut_attention(
    attn: AttentionWeights,
    weights: BlockWeights,
    statistics: BlockStatistics,
    block: Block,
    choose: Choose,
    cfg: CompensationConfig,
) -> tuple[AttentionWeights, KeptAttention | None, dict[str, GroupError]]:
    """(`attn` without the heads, queries and keys that go, what is kept, errors); values only lose those of heads."""
    kept = choose(weights, statistics).attn
    if kept is None:
        return attn, None, {}
    heads, qk = kept.heads.to(attn.proj.device), kept.qk.to(attn.proj.device)
    v_bias = None if attn.v_bias is None else attn.v_bias[heads]
    attn = replace(attn, v=attn.v[heads], v_bias=v_bias, proj=attn.proj[:, heads])
    if statistics.logits is None or qk.shape[1] == block.sizes.qk:
        return only_heads(attn, heads), kept, {}
    attn, error = compensate_qk(attn, statistics.logits, heads, qk, cfg)
    return attn, kept, {"qk": error}


def refit_mlp(
    mlp: MlpWeights, joint: Joint, fits: bool, cfg: CompensationConfig
) -> tuple[MlpWeights, Moments, CompensationConfig]:
    """(`mlp` with fc2 refitted to what it should give, moments of its hidden channels, `cfg` with the ridge taken).

    fits: whether images are kept aside for what follows.
    """
    how, moments = with_ridge(mlp.fc2, joint, cfg), joint.fitted if fits else joint.every
    fc2, bias = refit(mlp.fc2, moments, how.ridge)
    hidden = select_moments(moments, torch.arange(fc2.shape[1], device=moments.mean.device))
    return replace(mlp, fc2=fc2, fc2_bias=bias), hidden, how


def cut_mlp(
    mlp: MlpWeights, weights: BlockWeights, hidden: Moments, choose: Choose, cfg: CompensationConfig
) -> tuple[MlpWeights, Tensor | None, dict[str, GroupError]]:
    """(`mlp` without the channels that go, those that stay and the error if any do), by their moments.

    `mlp` is to be that of `weights`.
    """
    units = choose(replace(weights, mlp=mlp), BlockStatistics(hidden=hidden)).mlp
    if units is None:
        return mlp, None, {}
    mlp, error = compensate_mlp(mlp, hidden, units, cfg)
    return mlp, units, {"mlp": error}


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
) -> tuple[AttentionWeights, dict[str, GroupError]]:
    """(`attn` with proj refitted to what it should give, the error of values); they go, and are refitted with it."""
    cut, begun, how, errors = ranks.once(refit_proj, attn, joint, kept, cfg)
    if begun is None:
        return cut, errors
    fitted, fits = fit_values(stream, pruned, block, *begun, targets, how, seed)
    errors["vo"] = replace(errors["vo"], fits=fits)
    return fitted if any(fit.rounds for fit in fits) else cut, errors


def refit_proj(
    attn: AttentionWeights, joint: Joint, kept: KeptAttention | None, cfg: CompensationConfig
) -> tuple[
    AttentionWeights, tuple[AttentionWeights, AttentionWeights] | None, CompensationConfig, dict[str, GroupError]
]:
    """(`attn` with proj refitted and values cut, what `fit_values` begins with, `cfg` with the ridge taken, errors).

    The second is the first without images kept aside, and that before the cut; None where values are not refitted.
    """
    how = with_ridge(attn.proj.flatten(1), joint, cfg)
    whole = with_proj(attn, joint.every, how)
    if kept is None or kept.vo.shape[1] == attn.v.shape[1]:
        return whole, None, how, {}
    cut, error = cut_values(whole, joint.every, kept, how)
    if cfg.vo != "reduced_rank" or joint.aside is None:
        return cut, None, how, {"vo": error}
    whole = with_proj(attn, joint.fitted, how)
    begun, _ = cut_values(whole, joint.fitted, kept, how)
    return cut, (begun, whole), how, {"vo": error}


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
