"""What the branches of a block see of the pruned stream, and what should come out of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.moments import Moments, RunningMoments
from corp_cli.linalg.ridge import best_ridge, refit
from corp_cli.method.calibrate import RunningLogits, accumulation_device, pooled
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import Batch, Stream, token_weights
from corp_cli.models.blocks import Block
from corp_cli.models.kinds import rows_of
from corp_cli.models.streams import input_of
from corp_cli.models.sublayers import Sublayer

RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of which each layer takes the best


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
    """A branch on one batch of x̂: what it is given, what goes into its last layer, what should come out, how
    often tokens count, which rows are of images kept aside, and how many tokens each stands for (None: one)."""

    given: Tensor
    inputs: Tensor
    target: Tensor
    weights: Tensor
    aside: Tensor
    sizes: Tensor | None = None


def counted(stream: Stream, batch: Batch, branch: Sublayer) -> tuple[Tensor, Tensor]:
    """(how often tokens of a batch count in what a branch sees, which of that is of images kept aside)."""
    weights, aside = token_weights(stream, batch, branch), stream.aside[batch.index].to(stream.device)
    return weights, aside.repeat_interleave(len(weights) // len(aside))  # windows


def observe(stream: Stream, branch: Sublayer, cfg: CompensationConfig) -> Iterator[Seen]:
    """The dense branch on every batch of x̂; meanwhile x advances past it."""
    for batch in stream.batches():
        on_dense = None if batch.x_hat is batch.x else branch.branch(batch.x)
        with input_of(branch.output) as inputs:  # behind that on x: whoever watches the branch sees x̂ last
            own = branch.branch(batch.x_hat, batch.sizes)
        on_dense = own if on_dense is None else on_dense
        given, wanted = branch.split(branch.pre(batch.x_hat)), target(branch, batch, on_dense, own, cfg)
        yield Seen(given, inputs[0], wanted, *counted(stream, batch, branch), batch.sizes)
        stream.dense[batch.index] = stream.keep(branch.added(batch.x, on_dense))


def observe_attention(
    stream: Stream, dense: nn.Module, block: Block, branch: Sublayer, cfg: CompensationConfig, cuts: bool
) -> tuple[BlockStatistics, list[Tensor]]:
    """(statistics of the dense attention on x̂ of all processes, what proj should give, per batch).

    cuts: whether queries and keys will be.
    """
    home = accumulation_device(stream.device)
    logits = None if "qk" in block.refusals else RunningLogits(block, home, cuts and cfg.weighs_logits)
    outputs, targets = RunningMoments(branch.output.in_features, home), []
    with rows_of(dense.get_submodule(block.attn)) as rows:
        for seen in observe(stream, branch, cfg):
            if logits is not None:
                logits.add(rows[0], seen.weights, seen.sizes)
            outputs.add(seen.inputs.flatten(0, -2), seen.weights.flatten())
            targets.append(stream.keep(seen.target))
    return BlockStatistics(
        logits=None if logits is None else logits.result(), head_output=pooled(outputs).result()
    ), targets


def observe_cut(stream: Stream, cut: Sublayer, targets: list[Tensor]) -> Iterator[Seen]:
    """The branch `cut` on every batch of x̂, with what it should give."""
    for batch in stream.batches():
        with input_of(cut.output) as inputs:
            cut.branch(batch.x_hat, batch.sizes)
        yield Seen(batch.x_hat, inputs[0], targets[batch.index].to(stream.device), *counted(stream, batch, cut))


@dataclass(frozen=True)
class Joint:
    """Moments of the inputs of a last layer and of what should come out, side by side: of all images, of those that
    are `fitted`, and of those that are kept `aside` (None without any)."""

    every: Moments
    fitted: Moments
    aside: Moments | None


def joint_moments(stream: Stream, branch: Sublayer, every: Iterable[Seen]) -> Joint:
    """Moments of the inputs of `branch.output` and of what should come out, side by side, over all processes."""
    width, home = branch.output.in_features + branch.output.out_features, accumulation_device(stream.device)
    fitted, aside = RunningMoments(width, home), RunningMoments(width, home)
    for seen in every:
        pairs = torch.cat([seen.inputs.flatten(1, -2), seen.target.flatten(1, -2)], -1)
        parts = [(fitted, ~seen.aside), (aside, seen.aside)] if seen.aside.any() else [(fitted, slice(None))]
        for moments, images in parts:
            x, weights = pairs[images].flatten(0, -2), seen.weights[images].flatten()
            if len(x):
                moments.add(x, weights)
    fitted, aside = pooled(fitted), pooled(aside)
    if not aside.count or not fitted.count:
        found = (fitted if fitted.count else aside).final()
        return Joint(found, found, None)
    return Joint(fitted.joined(aside).final(), fitted.final(), aside.final())


def with_ridge(weight: Tensor, joint: Joint, cfg: CompensationConfig) -> CompensationConfig:
    """`cfg` with the ridge, unless it says one, with which a layer [O, d] comes nearest on images kept aside."""
    if cfg.ridge_lambda is not None or joint.aside is None:
        return cfg
    return replace(cfg, ridge_lambda=best_ridge(weight, joint.fitted, joint.aside, RIDGES))


def refitted(weight: Tensor, joint: Joint, cfg: CompensationConfig) -> tuple[Tensor, Tensor]:
    """(W, b) of a layer [O, d], refitted to all of `joint`; see `ridge.refit`."""
    return refit(weight, joint.every, with_ridge(weight, joint, cfg).ridge)
