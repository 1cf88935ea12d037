"""Stage 3, values and outputs: refitted together where values are cut, as far as other images agree.

What the attention of every head gathers, u_h = A_h z, does not depend on its values. With its moments and those of what
should come out, values and `proj` are a reduced-rank regression, in which every head sees what the others do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.fit import Fit
from corp_cli.linalg.moments import Moments, RunningMoments, transform_moments
from corp_cli.linalg.reduced_rank import HeadMaps, reduced_rank
from corp_cli.method.calibrate import accumulation_device, pooled
from corp_cli.method.compensate import only_heads
from corp_cli.method.observe import Seen, counted, joint_moments, observe_cut, refitted
from corp_cli.method.sample import drawn
from corp_cli.method.stream import Stream
from corp_cli.models.adapter import replace_attention
from corp_cli.models.blocks import AttentionWeights, Block
from corp_cli.models.streams import input_of, sublayers
from corp_cli.models.sublayers import Sublayer
from corp_cli.runtime import ranks

RIDGES = (0.01, 0.1, 1.0)  # λ, of which the first sweep takes the best
SWEEPS = 3


def fit_values(
    stream: Stream,
    pruned: nn.Module,
    block: Block,
    attn: AttentionWeights,
    whole: AttentionWeights,
    targets: list[Tensor],
    cfg: CompensationConfig,
    seed: int,
) -> tuple[AttentionWeights, tuple[Fit, ...]]:
    """`attn`, whose values were cut from those of `whole`, with values and proj refitted; what came of every group.

    Heads are taken in groups whose moments are no larger than those of the MLP. All tokens of all images fit the final
    proj.
    """
    fits = []
    for heads in groups_of(attn, block):
        attn, fit = fit_group(stream, pruned, block, attn, whole, heads, targets, cfg, seed)
        fits += [] if fit is None else [fit]
    if any(fit.rounds for fit in fits):
        replace_attention(pruned, block, attn)
        cut = sublayers(pruned, block)[0]
        joint = joint_moments(stream, cut, observe_cut(stream, cut, targets))
        proj, bias = ranks.once(refitted, attn.proj.flatten(1), joint, cfg)
        attn = replace(attn, proj=proj.reshape(attn.proj.shape), proj_bias=bias)
    return attn, tuple(fits)


def groups_of(attn: AttentionWeights, block: Block) -> tuple[Tensor, ...]:
    """The heads, in groups that are worked on together."""
    count, width = len(attn.v), attn.v.shape[2]
    most = max(1, (block.sizes.mlp or 4 * width) // width)
    return torch.arange(count, device=attn.v.device).split(most)


def fit_group(
    stream: Stream,
    pruned: nn.Module,
    block: Block,
    attn: AttentionWeights,
    whole: AttentionWeights,
    heads: Tensor,
    targets: list[Tensor],
    cfg: CompensationConfig,
    seed: int,
) -> tuple[AttentionWeights, Fit | None]:
    """`attn` with the values of some heads and their part of proj refitted to what the other heads leave.

    None: no token was drawn of those that are to be fitted, or of those that decide.
    """
    start = HeadMaps(attn.v[heads], attn.proj[:, heads].movedim(1, 0))
    towards = whole.proj[:, heads].movedim(1, 0) @ whole.v[heads]
    seen = observe_gathered(stream, pruned, block, attn, heads, targets)
    parts = gathered_moments(stream, seen, start, cfg, seed)
    if parts is None:
        return attn, None
    fitted, others = parts
    found, fit = ranks.once(reduced_rank, start, towards, fitted, others, RIDGES, SWEEPS)
    if not fit.rounds:
        return attn, fit
    v, proj = attn.v.clone(), attn.proj.clone()
    v[heads], proj[:, heads] = found.encode, found.decode.movedim(0, 1)
    bias, v_bias = found.bias(fitted), attn.v_bias
    if attn.proj_bias is not None:
        bias = bias + attn.proj_bias
    if v_bias is not None:  # rows of an attention sum to one: it is a constant, and goes into that of proj
        bias = bias + torch.einsum("hok,hk->o", start.decode, v_bias[heads])
        v_bias = v_bias.index_fill(0, heads, 0)
    return replace(attn, v=v, v_bias=v_bias, proj=proj, proj_bias=bias), fit


def observe_gathered(
    stream: Stream, pruned: nn.Module, block: Block, attn: AttentionWeights, heads: Tensor, targets: list[Tensor]
) -> Iterator[Seen]:
    """u_h of `heads` side by side on every batch of x̂, as what is given, and what `attn` leaves of the target."""
    now = attention_of(pruned, block, attn)
    probe = attention_of(pruned, block, gathering(attn, heads))
    for batch in stream.batches():
        left = targets[batch.index].to(stream.device) - now.branch(batch.x_hat, batch.sizes)
        with input_of(probe.output) as gathered:
            probe.branch(batch.x_hat, batch.sizes)
        yield Seen(gathered[0], gathered[0], left, *counted(stream, batch, now))


def attention_of(pruned: nn.Module, block: Block, attn: AttentionWeights) -> Sublayer:
    """The attention branch of a block of `pruned`, in which these weights are put."""
    replace_attention(pruned, block, attn)
    return sublayers(pruned, block)[0]


def gathering(attn: AttentionWeights, heads: Tensor) -> AttentionWeights:
    """`heads` of `attn` with the identity for values: what goes into proj are then the gathered inputs."""
    count, width = len(heads), attn.v.shape[2]
    values = torch.eye(width).to(attn.v).expand(count, -1, -1)
    v_bias = None if attn.v_bias is None else attn.v_bias.new_zeros(count, width)
    proj = attn.proj.new_zeros(len(attn.proj), count, width)
    return replace(only_heads(attn, heads), v=values, v_bias=v_bias, proj=proj)


def gathered_moments(
    stream: Stream, every: Iterator[Seen], start: HeadMaps, cfg: CompensationConfig, seed: int
) -> tuple[Moments, Moments] | None:
    """Moments of u and of what these heads should give, of the images that are fitted and of those kept aside."""
    count, _, width = start.encode.shape
    inputs, outputs = count * width, start.decode.shape[1]
    home = accumulation_device(stream.device)
    parts = RunningMoments(inputs + outputs, home), RunningMoments(inputs + outputs, home)
    for _, (u, left, weights, aside) in drawn(stream, every, cfg.fit_tokens, seed):
        for moments, those in zip(parts, (~aside, aside), strict=True):
            if those.any():
                moments.add(torch.cat([u, left], 1)[those], weights[those])
    parts = pooled(parts[0]), pooled(parts[1])
    if not all(part.count for part in parts):
        return None
    both = torch.eye(inputs + outputs, dtype=torch.float64, device=parts[0].scatter.device)
    both[inputs:, :inputs] = start.maps()  # what is left, and what these heads gave
    fitted, others = (transform_moments(part.result(), both) for part in parts)
    return fitted, others
