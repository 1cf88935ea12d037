"""Stage 3, sequential: repair block by block on the stream that the blocks before, already cut, really produce.

One-shot compensation takes every block's inputs from the dense model. Here each block is calibrated, ranked and
compensated on the *pruned* stream x̂, and the last linear layer of each branch is refitted towards

    f(x̂) + α (f(x) - f(x̂)) + β (x - x̂),

f the dense branch and x the dense stream: it answers to its own inputs, and undoes a part of what went wrong before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_cli import console
from corp_cli.calibrate import RunningLogits, accumulation_device
from corp_cli.compensate import Errors, GroupError, compensate_mlp, compensate_qk, compensate_vo, only_heads
from corp_cli.config import CompensationConfig, PruneConfig, RankerConfig
from corp_cli.linalg.moments import Moments, RunningMoments, select_moments
from corp_cli.linalg.ridge import refit
from corp_cli.models.adapter import block_weights, replace_attention, replace_mlp
from corp_cli.models.attention_maps import AttentionMaps
from corp_cli.models.blocks import Block, Sizes
from corp_cli.models.kinds import rows_of
from corp_cli.models.streams import enter, input_of, read_tokens, sublayers, through, tokens
from corp_cli.models.sublayers import Sublayer
from corp_cli.rank import Context, keep, rank_block
from corp_cli.resume import Progress
from corp_cli.statistics import BlockStatistics


@dataclass
class Stream:
    """Inputs [B, N, D] or [B, H, W, D] of the block at hand, one per batch, on the host: dense x and pruned x̂.

    weights: how often each token counts at the output of each block, [L, B, N] per batch; None: every token once.
    """

    dense: list[Tensor]
    pruned: list[Tensor]
    weights: list[Tensor | None]


def start_streams(
    model: nn.Module, blocks: tuple[Block, ...], batches: Iterable[Tensor], cfg: CompensationConfig
) -> Stream:
    """The input of the first block, and the weights of its tokens, for every batch of images.

    Where tokens keep a grid, every token counts once: no head reads single ones.
    """
    found: list[Tensor] = []
    weights: list[Tensor | None] = []
    for images in batches:
        x = tokens(model, images)
        found.append(x.cpu())
        sequence = x.ndim == 3
        weights.append(TOKEN_WEIGHTS[cfg.token_weights](model, blocks, x, cfg).cpu() if sequence else None)
    return Stream(found, list(found), weights)


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
    batch, n, _ = x.shape
    attentions = []
    for block in blocks:
        with AttentionMaps() as maps:
            x = through(model, block, x)
        itself = torch.eye(n).to(x).expand(batch, n, n)  # an attention that is computed otherwise
        attentions.append(maps.found[0] if len(maps.found) == 1 else itself)
    reads = read_tokens(model)
    reached = x.new_zeros(batch, n)
    reached[:, : reads or n] = 1 / (reads or n)
    weights = []
    for attention in reversed(attentions):
        weights.append(cfg.token_floor + (1 - cfg.token_floor) * n * reached)
        reached = (reached + (reached[:, None] @ attention)[:, 0]) / 2
    return torch.stack(weights[::-1])


TOKEN_WEIGHTS = {"uniform": uniform_weights, "class_token": class_token_weights, "rollout": rollout_weights}


def target(branch: Sublayer, x: Tensor, x_hat: Tensor, dense: Tensor, own: Tensor, cfg: CompensationConfig) -> Tensor:
    """What `branch.output` should give on x̂: own + α (dense - own) + β (x - x̂) / gain, in the order of own.

    dense and own are what the dense branch gives on x and on x̂. β acts on the stream, so it is divided by what
    multiplies the output on its way there; where that is no elementwise scale (a norm), β is left out.
    """
    y = own + cfg.alpha * (dense - own)
    return y if branch.gain is None else y + cfg.beta * branch.split(x - x_hat) * inverse_gain(branch.gain)


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

    @property
    def home(self) -> torch.device:
        """Where float64 sums are kept."""
        return accumulation_device(self.device)


@torch.inference_mode()
def compensate_sequentially(
    model: nn.Module,
    blocks: tuple[Block, ...],
    sizes: tuple[Sizes, ...],
    batches: Iterable[Tensor],
    groups: frozenset[str],
    cfg: PruneConfig,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[nn.Module, Errors]:
    """A copy of `model` cut to `sizes`, each block ranked and compensated on the stream of those before it.

    Blocks that `progress` holds are taken from there, and others are added to it.
    """
    context = Context.seeded(cfg.seed, cfg.compensation.ridge_lambda)
    repair = Repair(model, copy.deepcopy(model), groups, cfg.ranker, cfg.compensation, context, device)
    stream = start_streams(model, blocks, batches, cfg.compensation)
    errors = []
    for i, block in enumerate(console.track(blocks, "compensate", len(blocks))):
        found = progress.read(i, block, repair.pruned) if progress else None
        if found is not None:
            walk(repair, block, stream)
        else:
            enter_block(repair, block, stream)
            found = repair_attention(repair, i, block, sizes[i], stream)
            found.update(repair_mlp(repair, i, block, sizes[i], stream))
            if progress is not None:
                progress.write(i, block, repair.pruned, model, found)
        errors.append(found)
    return repair.pruned.eval(), tuple(errors)


def enter_block(repair: Repair, block: Block, stream: Stream) -> None:
    """Both streams become the input of `block`."""
    for i, x, x_hat in on_device(stream, repair.device):
        stream.dense[i], stream.pruned[i] = (enter(repair.dense, block, t).cpu() for t in (x, x_hat))


def token_weights(stream: Stream, batch: int, index: int, branch: Sublayer, x: Tensor) -> Tensor:
    """How often each token counts that the module of a branch of block `index` sees of x; those filled up, never."""
    given = stream.weights[batch]
    weights = x.new_ones(x.shape[:-1]) if given is None else given[index].to(x)
    return branch.split(weights[..., None])[..., 0]


def on_device(stream: Stream, device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(batch, x, x̂) for every batch."""
    for i, (x, x_hat) in enumerate(zip(stream.dense, stream.pruned, strict=True)):
        yield i, x.to(device), x_hat.to(device)


def advance(stream: Stream, branch: Sublayer, device: torch.device) -> None:
    """x̂ ← what comes out behind the pruned branch now in place."""
    for i, x_hat in enumerate(stream.pruned):
        x_hat = x_hat.to(device)
        stream.pruned[i] = branch.added(x_hat, branch.branch(x_hat)).cpu()


def walk(repair: Repair, block: Block, stream: Stream) -> None:
    """Both streams go through a block that was repaired before."""
    stream.dense = [through(repair.dense, block, x.to(repair.device)).cpu() for x in stream.dense]
    stream.pruned = [through(repair.pruned, block, x.to(repair.device)).cpu() for x in stream.pruned]


def walk_past(repair: Repair, dense: Sublayer, stream: Stream) -> dict[str, GroupError]:
    """Both streams go through a branch that cannot be read, and so neither cut nor refitted."""
    for i, x, _ in on_device(stream, repair.device):
        stream.dense[i] = dense.added(x, dense.branch(x)).cpu()
    advance(stream, dense, repair.device)
    return {}


def observe_attention(
    repair: Repair, index: int, block: Block, dense: Sublayer, stream: Stream
) -> tuple[BlockStatistics, list[Tensor]]:
    """(statistics of the dense attention on x̂, what proj should give, per batch); meanwhile x advances past it."""
    logits = None if "qk" in block.refusals else RunningLogits(block, repair.home)
    outputs = RunningMoments(dense.output.in_features, repair.home)
    attn = repair.dense.get_submodule(block.attn)
    wanted = []
    for i, x, x_hat in on_device(stream, repair.device):
        on_dense = dense.branch(x)
        with input_of(dense.output) as head_outputs, rows_of(attn) as rows:
            own = dense.branch(x_hat)
        weights = token_weights(stream, i, index, dense, x)
        if logits is not None:
            logits.add(rows[0], weights)
        outputs.add(head_outputs[0].flatten(0, -2), weights.flatten())
        wanted.append(target(dense, x, x_hat, on_dense, own, repair.cfg).cpu())
        stream.dense[i] = dense.added(x, on_dense).cpu()
    return BlockStatistics(logits=None if logits is None else logits.result(), head_output=outputs.result()), wanted


def joint_moments(repair: Repair, index: int, cut: Sublayer, stream: Stream, wanted: list[Tensor]) -> Moments:
    """Moments of the inputs of `cut.output` on x̂ and of what it should give, side by side."""
    joint = RunningMoments(cut.output.in_features + cut.output.out_features, repair.home)
    for i, _, x_hat in on_device(stream, repair.device):
        with input_of(cut.output) as inputs:
            cut.branch(x_hat)
        pair = torch.cat([inputs[0].flatten(0, -2), wanted[i].to(repair.device).flatten(0, -2)], -1)
        joint.add(pair, token_weights(stream, i, index, cut, x_hat).flatten())
    return joint.result()


def repair_attention(repair: Repair, index: int, block: Block, sizes: Sizes, stream: Stream) -> dict[str, GroupError]:
    """Heads, queries and keys are cut first; proj is refitted on the head outputs that these leave; then values go."""
    cfg, home, errors = repair.cfg, repair.home, {}
    dense, _ = sublayers(repair.dense, block)
    whole = block_weights(repair.dense, block)
    if whole.attn is None:
        return walk_past(repair, dense, stream)
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
    advance(stream, sublayers(repair.pruned, block)[0], repair.device)
    return errors


def repair_mlp(repair: Repair, index: int, block: Block, sizes: Sizes, stream: Stream) -> dict[str, GroupError]:
    """fc2 is refitted on the hidden channels of the pruned stream, which are then ranked and cut for the new fc2."""
    errors: dict[str, GroupError] = {}
    _, dense = sublayers(repair.dense, block)
    whole = block_weights(repair.dense, block)
    if whole.mlp is None:
        return walk_past(repair, dense, stream)
    inputs = dense.output.in_features
    joint = RunningMoments(inputs + dense.output.out_features, repair.home)
    for i, x, x_hat in on_device(stream, repair.device):
        on_dense = dense.branch(x)
        with input_of(dense.output) as hidden:
            own = dense.branch(x_hat)
        y = target(dense, x, x_hat, on_dense, own, repair.cfg)
        weights = token_weights(stream, i, index, dense, x)
        joint.add(torch.cat([hidden[0], y], -1).flatten(0, -2), weights.flatten())
        stream.dense[i] = dense.added(x, on_dense).cpu()
    moments = joint.result()
    fc2, bias = refit(whole.mlp.fc2, moments, repair.cfg.ridge_lambda)
    new = replace(whole.mlp, fc2=fc2, fc2_bias=bias)
    found = BlockStatistics(hidden=select_moments(moments, torch.arange(inputs, device=repair.home)))
    mlp, ranker = repair.groups & {"mlp"}, repair.ranker
    kept = keep(rank_block(replace(whole, mlp=new), found, block, mlp, ranker, repair.context), block, sizes).mlp
    if kept is not None and found.hidden is not None:
        new, errors["mlp"] = compensate_mlp(new, found.hidden, kept, repair.cfg)
    replace_mlp(repair.pruned, block, new)
    advance(stream, sublayers(repair.pruned, block)[1], repair.device)
    return errors
