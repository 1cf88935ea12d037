"""Damage curves: what cutting one group of one block costs at the model's outputs, measured in context."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.lowrank import logit_factors, output_factors
from corp_cli.linalg.moments import diagonal_blocks
from corp_cli.linalg.obs import removal_order
from corp_cli.method.compensate import compensate_block, replace_block
from corp_cli.method.keep import keep
from corp_cli.method.rank import Scores
from corp_cli.method.statistics import BlockStatistics, Statistics
from corp_cli.models.adapter import block_weights, put_module
from corp_cli.models.blocks import TOKENS, Block, BlockWeights, Sizes
from corp_cli.models.streams import logits_from, through, tokens
from corp_cli.models.token_block import needed_tokens, put_token_blocks, spare_tokens
from corp_cli.runtime import console, ranks

# fraction of every group that is cut around the one measured → fractions removed of that one at which it is measured
ANCHORS = {0.0: (0.125, 0.25, 0.5, 0.75), 0.2: (0.125, 0.25, 0.5, 0.75), 0.4: (0.25, 0.5, 0.75, 0.875)}

MERGED = (0.125, 0.25, 0.5, 0.75, 0.875)  # fractions of the tokens merged at which that is measured
UNDONE = 0.3  # of the damage of the first block, by the repair of all behind it


@dataclass(frozen=True)
class Curve:
    """Damage per image at every kept size 0..dense of one group of one block, or at every number of tokens it leaves.

    It is the KL of the outputs to the dense model in nats, or 1 - cos of the features where there is no classifier,
    measured at the anchors and interpolated between them along the closed-form reconstruction error; less what the run
    will still undo (`refitted`, `undone`).
    """

    block: int
    group: str
    damage: Tensor  # [dense + 1], never rising with size, zero at dense


def reconstruction_errors(
    group: str, weights: BlockWeights, statistics: BlockStatistics, scores: Scores, cfg: CompensationConfig
) -> Tensor:
    """Error left at every kept size 0..dense of a group in closed form, [dense + 1], in units of its own."""
    if group == "mlp" and scores.lost is not None:
        return scores.lost
    if group == "mlp":
        assert weights.mlp is not None
        assert statistics.hidden is not None
        return removal_order(weights.mlp.fc2, statistics.hidden, cfg.ridge).by_size()
    assert weights.attn is not None
    if group == "qk":
        assert statistics.logits is not None
        how = "weighted_lowrank" if cfg.weighs_logits else "lowrank"
        _, _, sigma = logit_factors(*statistics.logits.fitted(how))
    else:
        assert statistics.head_output is not None
        of_head = diagonal_blocks(statistics.head_output.covariance, weights.attn.v.shape[1])
        _, _, sigma = output_factors(of_head, weights.attn.proj.transpose(0, 1))
    spectrum = sigma.square().sum(0)
    return torch.cat([spectrum.flip(0).cumsum(0).flip(0), spectrum.new_zeros(1)])


def interpolate(errors: Tensor, sizes: list[int], damage: list[float]) -> Tensor:
    """Damage at every size 0..dense, linear in `errors` between the measured `sizes` (descending, dense first).

    Below the smallest measured size the last slope goes on. A measured dip is noise: damage never falls as more goes.
    """
    x = errors.cpu().double()
    points, values = [float(x[size]) for size in sizes], list(damage)
    for i in range(1, len(values)):
        values[i] = max(values[i], values[i - 1])
    curve = torch.empty_like(x)
    for size in range(len(x)):
        i = next((i for i in range(1, len(sizes)) if sizes[i] <= size), len(sizes) - 1)
        span = points[i] - points[i - 1]
        share = (float(x[size]) - points[i - 1]) / span if span > 0 else 0.0
        curve[size] = values[i - 1] + share * (values[i] - values[i - 1])
    return curve - curve[-1]


def divergence(reference: Tensor, logits: Tensor) -> float:
    """Σ over images of KL(dense ‖ model) from log-probabilities `reference` and logits."""
    return float(F.kl_div(F.log_softmax(logits.double(), -1), reference, reduction="sum", log_target=True))


def distance(reference: Tensor, features: Tensor) -> float:
    """Σ over images of 1 - cos(dense, model), from features: the damage to a model without a classifier."""
    return float((1 - F.cosine_similarity(features.double().flatten(1), reference)).sum())


@torch.no_grad()
def damage_curves(
    model: nn.Module,
    blocks: tuple[Block, ...],
    statistics: Statistics,
    scores: tuple[Scores, ...],
    context: tuple[Sizes, ...],
    anchors: tuple[float, ...],
    wanted: Collection[tuple[int, str]],
    batches: Iterable[Tensor],
    cfg: CompensationConfig,
) -> list[Curve]:
    """The curve of every `wanted` (block, group), all others being cut to the sizes `context`.

    It is measured where the fractions `anchors` of the group are removed. The stream is kept at the block concerned, so
    that a measurement costs only the blocks from there on. Of several processes each measures some of the blocks.
    """
    merging, read = any(group == TOKENS for _, group in wanted), needed_tokens(model)
    if merging or read:
        model = copy.deepcopy(model)
    if merging:
        put_token_blocks(model)
    elif read:  # the same outputs for a fraction of the last block
        spare_tokens(model, (), read)
    around = copy.deepcopy(model)
    dense = tuple(block_weights(model, block) for block in blocks)

    def solve(i: int) -> BlockWeights:
        return compensate_block(dense[i], statistics[i], keep(scores[i], blocks[i], context[i]), cfg)[0]

    solved = ranks.spread(solve, range(len(blocks)))
    for block, weights in zip(blocks, console.track(solved, "context", len(blocks)), strict=True):
        replace_block(around, block, weights)
    streams, references, classifies = [], [], getattr(model, "num_classes", None) != 0
    damage_of = divergence if classifies else distance
    for images in batches:
        streams.append(tokens(model, images))
        outputs = model(images).double()
        references.append(F.log_softmax(outputs, -1) if classifies else outputs.flatten(1))

    def outcome(streams: list[Tensor], rest: tuple[Block, ...]) -> float:
        """Damage per image, with the modules that are in place now, from what comes into the first block of `rest`."""
        every = zip(streams, references, strict=True)
        found = sum(damage_of(reference, logits_from(around, x, rest)) for x, reference in every)
        return found / sum(len(x) for x in streams)

    curves, of_context, own = [], outcome(streams, blocks), [one for one in wanted if ranks.takes(one[0])]
    for i, block in enumerate(console.track(blocks, "curves", len(blocks))):
        module = around.get_submodule(block.name)
        in_context = copy.deepcopy(module)
        if (i, TOKENS) in own:
            merged = partial(outcome, streams, blocks[i:])
            curves.append(merge_curve(i, module, streams[0].shape[1], of_context, merged))
        for group in (group for owner, group in own if owner == i and group != TOKENS):
            size = getattr(block.sizes, group)
            points = sorted({size, *(max(1, round(size * (1 - a))) for a in anchors)}, reverse=True)
            damage = []
            for point in points:
                if point == getattr(context[i], group):
                    damage.append(of_context)
                    continue
                trial = keep(scores[i], block, replace(context[i], **{group: point}))
                half = replace(trial, attn=None) if group == "mlp" else replace(trial, mlp=None)
                weights, _ = compensate_block(dense[i], statistics[i], half, cfg)
                put_module(around, block.name, copy.deepcopy(in_context))
                path = block.mlp if group == "mlp" else block.attn
                put_module(around, path, copy.deepcopy(model.get_submodule(path)))
                replace_block(around, block, weights)
                damage.append(outcome(streams, blocks[i:]))
            errors = reconstruction_errors(group, dense[i], statistics[i], scores[i], cfg)
            curves.append(Curve(i, group, interpolate(errors, points, damage)))
        put_module(around, block.name, in_context)
        streams = [through(around, block, x) for x in streams]
    return sorted(chain.from_iterable(ranks.gathered(curves)), key=lambda curve: curve.block)


def refitted(curves: list[Curve], left: tuple[float, ...]) -> list[Curve]:
    """`curves` as they will be once MLPs are refitted, which leaves left[block] of their error; all of it, where ()."""
    return [
        replace(curve, damage=left[curve.block] * curve.damage) if left and curve.group == "mlp" else curve
        for curve in curves
    ]


def undone(curves: list[Curve], blocks: int) -> list[Curve]:
    """`curves` as they will be once blocks are repaired on what those before give them, which undoes a part of it.

    It is `UNDONE` of the first of `blocks` and nothing of the last, which has none behind it.
    """
    behind = [(blocks - 1 - curve.block) / max(1, blocks - 1) for curve in curves]
    return [
        replace(curve, damage=(1 - UNDONE * share) * curve.damage) for curve, share in zip(curves, behind, strict=True)
    ]


def merge_curve(block: int, module: Any, tokens: int, of_context: float, outcome: Callable[[], float]) -> Curve:
    """The curve of merging in one block alone: `module`, the TokenBlock that is in place, of a stream of `tokens`.

    of_context: the damage where it merges none; outcome(): where it merges what it says.
    """
    from scipy.interpolate import PchipInterpolator  # here, since scipy takes long to import

    patches = tokens - module.prefix
    sizes = sorted({tokens, *(tokens - int(fraction * patches) for fraction in MERGED)}, reverse=True)
    damage = [of_context]
    for size in sizes[1:]:
        module.merge = tokens - size
        damage.append(outcome())
    module.merge = 0
    rising = np.maximum.accumulate(np.array(damage) - of_context)
    curve = PchipInterpolator(sizes[::-1], rising[::-1])(np.maximum(np.arange(tokens + 1), sizes[-1]))
    return Curve(block, TOKENS, torch.from_numpy(curve))
