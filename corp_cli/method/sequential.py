"""Stage 3, sequential: repair block by block on the stream that the blocks before, already cut, really produce.

One-shot compensation takes every block's inputs from the dense model. Here each block is calibrated, ranked and
compensated on the *pruned* stream x̂, and the last linear layer of each branch is refitted towards

    f(x̂) + α (f(x) - f(x̂)) + β (x - x̂),

f the dense branch and x the dense stream: it answers to its own inputs, and undoes a part of what went wrong before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, PruneConfig, RankerConfig
from corp_cli.files.cache.blocks import Progress
from corp_cli.linalg.moments import Moments, RunningMoments, select_moments
from corp_cli.linalg.ridge import refit
from corp_cli.method.calibrate import RunningLogits, accumulation_device
from corp_cli.method.compensate import Errors, GroupError, compensate_mlp, compensate_qk, compensate_vo, only_heads
from corp_cli.method.rank import Context, keep, rank_block
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import Batch, Stream, merge_stream, on_device, start_streams, token_weights
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.blocks import Block, Sizes
from corp_cli.models.kinds import rows_of
from corp_cli.models.streams import enter, input_of, sublayers
from corp_cli.models.sublayers import Sublayer
from corp_cli.models.token_block import mean_keys, prefix_tokens
from corp_cli.runtime import console
from corp_cli.sizes.plan import SizePlan


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
class Repair:
    """What the repair of every block needs: the dense model, the one being cut, and how."""

    dense: nn.Module
    pruned: nn.Module
    groups: frozenset[str]
    ranker: RankerConfig
    cfg: CompensationConfig
    context: Context
    device: torch.device
    merge: tuple[int, ...]  # tokens that each block merges; empty: none

    @property
    def home(self) -> torch.device:
        """Where float64 sums are kept."""
        return accumulation_device(self.device)


@torch.no_grad()  # not inference_mode: the parameters made here are the user's, to train further
def compensate_sequentially(
    model: nn.Module,
    blocks: tuple[Block, ...],
    plan: SizePlan,
    batches: Iterable[Tensor],
    groups: frozenset[str],
    cfg: PruneConfig,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[nn.Module, Errors]:
    """A copy of `model` cut to the sizes of `plan`, each block ranked and compensated on the stream of those before it.

    That stream merges tokens as the plan says; the copy does not yet. Blocks that `progress` holds are taken from it,
    and others are added to it.
    """
    context = Context.seeded(cfg.seed, cfg.compensation.ridge_lambda)
    repair = Repair(model, copy.deepcopy(model), groups, cfg.ranker, cfg.compensation, context, device, plan.merge)
    stream = start_streams(model, blocks, batches, cfg.compensation)
    errors = []
    for i, block in enumerate(console.track(blocks, "compensate", len(blocks))):
        found = progress.read(i, block, repair.pruned) if progress else None
        if found is not None:
            walk(repair, i, block, stream)
        else:
            enter_block(repair, block, stream)
            found = repair_attention(repair, i, block, plan.sizes[i], stream)
            found.update(repair_mlp(repair, i, block, plan.sizes[i], stream))
            if progress is not None:
                progress.write(i, block, repair.pruned, model, found)
        errors.append(found)
    return repair.pruned.eval(), tuple(errors)


def enter_block(repair: Repair, block: Block, stream: Stream) -> None:
    """Both streams become the input of `block`."""
    for batch in on_device(stream, repair.device):
        both = (enter(repair.dense, block, t).cpu() for t in (batch.x, batch.x_hat))
        stream.dense[batch.index], stream.pruned[batch.index] = both


def advance_attention(repair: Repair, index: int, block: Block, stream: Stream) -> None:
    """x̂ ← what comes out behind the pruned attention now in place, and behind the merging of tokens."""
    branch, count = sublayers(repair.pruned, block)[0], repair.merge[index] if repair.merge else 0
    for batch in on_device(stream, repair.device):
        x_hat = branch.added(batch.x_hat, branch.branch(batch.x_hat, batch.sizes))
        if count > 0:
            keys = mean_keys(repair.pruned, block, branch.pre(batch.x_hat))
            merge_stream(stream, batch, x_hat, keys, prefix_tokens(repair.dense), count)
        else:
            stream.pruned[batch.index] = x_hat.cpu()


def advance_mlp(repair: Repair, block: Block, stream: Stream) -> None:
    """x̂ ← what comes out behind the pruned MLP now in place."""
    branch = sublayers(repair.pruned, block)[1]
    for batch in on_device(stream, repair.device):
        stream.pruned[batch.index] = branch.added(batch.x_hat, branch.branch(batch.x_hat)).cpu()


def walk(repair: Repair, index: int, block: Block, stream: Stream) -> None:
    """Both streams go through a block that was repaired before."""
    enter_block(repair, block, stream)
    advance_attention(repair, index, block, stream)
    advance_mlp(repair, block, stream)
    for branch in sublayers(repair.dense, block):
        advance_dense(repair, branch, stream)


def advance_dense(repair: Repair, branch: Sublayer, stream: Stream) -> None:
    """x ← what comes out behind the dense branch."""
    for batch in on_device(stream, repair.device):
        stream.dense[batch.index] = branch.added(batch.x, branch.branch(batch.x)).cpu()


def observe_attention(
    repair: Repair, index: int, block: Block, dense: Sublayer, stream: Stream
) -> tuple[BlockStatistics, list[Tensor]]:
    """(statistics of the dense attention on x̂, what proj should give, per batch); meanwhile x advances past it."""
    logits = None if "qk" in block.refusals else RunningLogits(block, repair.home)
    outputs = RunningMoments(dense.output.in_features, repair.home)
    attn = repair.dense.get_submodule(block.attn)
    wanted = []
    for batch in on_device(stream, repair.device):
        on_dense = dense.branch(batch.x)
        with input_of(dense.output) as head_outputs, rows_of(attn) as rows:
            own = dense.branch(batch.x_hat, batch.sizes)
        weights = token_weights(stream, batch, index, dense)
        if logits is not None:
            logits.add(rows[0], weights)
        outputs.add(head_outputs[0].flatten(0, -2), weights.flatten())
        wanted.append(target(dense, batch, on_dense, own, repair.cfg).cpu())
        stream.dense[batch.index] = dense.added(batch.x, on_dense).cpu()
    return BlockStatistics(logits=None if logits is None else logits.result(), head_output=outputs.result()), wanted


def joint_moments(repair: Repair, index: int, cut: Sublayer, stream: Stream, wanted: list[Tensor]) -> Moments:
    """Moments of the inputs of `cut.output` on x̂ and of what it should give, side by side."""
    joint = RunningMoments(cut.output.in_features + cut.output.out_features, repair.home)
    for batch in on_device(stream, repair.device):
        with input_of(cut.output) as inputs:
            cut.branch(batch.x_hat, batch.sizes)
        pair = torch.cat([inputs[0].flatten(0, -2), wanted[batch.index].to(repair.device).flatten(0, -2)], -1)
        joint.add(pair, token_weights(stream, batch, index, cut).flatten())
    return joint.result()


def repair_attention(repair: Repair, index: int, block: Block, sizes: Sizes, stream: Stream) -> dict[str, GroupError]:
    """Heads, queries and keys are cut first; proj is refitted on the head outputs that these leave; then values go."""
    cfg, home, errors = repair.cfg, repair.home, {}
    dense, _ = sublayers(repair.dense, block)
    whole = block_weights(repair.dense, block)
    if whole.attn is None:  # it cannot be read, and so neither cut nor refitted
        advance_dense(repair, dense, stream)
        advance_attention(repair, index, block, stream)
        return {}
    found, wanted = observe_attention(repair, index, block, dense, stream)
    groups = repair.groups - {"mlp"}
    kept = keep(rank_block(whole, found, block, groups, repair.ranker, repair.context), block, sizes).attn
    new = whole.attn
    if kept is not None:
        heads, qk = kept.heads.to(home), kept.qk.to(home)
        v_bias = None if new.v_bias is None else new.v_bias[heads]
        new = replace(new, v=new.v[heads], v_bias=v_bias, proj=new.proj[:, heads])
        if found.logits is not None and qk.shape[1] < block.sizes.qk:
            new, errors["qk"] = compensate_qk(new, found.logits, heads, qk, cfg)
        else:
            new = only_heads(new, heads)
    replace_attention(repair.pruned, block, new)
    cut, _ = sublayers(repair.pruned, block)
    moments = joint_moments(repair, index, cut, stream, wanted)
    proj, bias = refit(new.proj.flatten(1), moments, cfg.ridge_lambda)
    new = replace(new, proj=proj.reshape(new.proj.shape), proj_bias=bias)
    if kept is not None and kept.vo.shape[1] < block.sizes.vo:
        inputs = select_moments(moments, torch.arange(proj.shape[1], device=home))
        every = torch.arange(len(kept.heads), device=home)
        new, errors["vo"] = compensate_vo(new, inputs, every, kept.vo.to(home), cfg)
    replace_attention(repair.pruned, block, new)
    advance_attention(repair, index, block, stream)
    return errors


def repair_mlp(repair: Repair, index: int, block: Block, sizes: Sizes, stream: Stream) -> dict[str, GroupError]:
    """fc2 is refitted on the hidden channels of the pruned stream, which are then ranked and cut for the new fc2."""
    errors: dict[str, GroupError] = {}
    _, dense = sublayers(repair.dense, block)
    whole = block_weights(repair.dense, block)
    if whole.mlp is None:
        advance_dense(repair, dense, stream)
        advance_mlp(repair, block, stream)
        return {}
    inputs = dense.output.in_features
    joint = RunningMoments(inputs + dense.output.out_features, repair.home)
    for batch in on_device(stream, repair.device):
        on_dense = dense.branch(batch.x)
        with input_of(dense.output) as hidden:
            own = dense.branch(batch.x_hat)
        y = target(dense, batch, on_dense, own, repair.cfg)
        weights = token_weights(stream, batch, index, dense)
        joint.add(torch.cat([hidden[0], y], -1).flatten(0, -2), weights.flatten())
        stream.dense[batch.index] = dense.added(batch.x, on_dense).cpu()
    moments = joint.result()
    fc2, bias = refit(whole.mlp.fc2, moments, repair.cfg.ridge_lambda)
    new = replace(whole.mlp, fc2=fc2, fc2_bias=bias)
    found = BlockStatistics(hidden=select_moments(moments, torch.arange(inputs, device=repair.home)))
    mlp, ranker = repair.groups & {"mlp"}, repair.ranker
    kept = keep(rank_block(replace(whole, mlp=new), found, block, mlp, ranker, repair.context), block, sizes).mlp
    if kept is not None and found.hidden is not None:
        new, errors["mlp"] = compensate_mlp(new, found.hidden, kept, repair.cfg)
    replace_mlp(repair.pruned, block, new)
    advance_mlp(repair, block, stream)
    return errors
