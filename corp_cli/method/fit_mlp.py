"""Stage 3, the MLP in front of its nonlinearity: the kept channels are refitted too, as far as other images agree.

Some tokens of every image are drawn, those that count more with a higher chance. A tenth of the images is kept aside:
their error decides how many rounds of Gauss-Newton are worth it, with which λ, and whether the layer is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.gauss_newton import Fit, Layers, Tokens, Units, gauss_newton
from corp_cli.linalg.ridge import refit
from corp_cli.method.calibrate import require_finite
from corp_cli.method.compensate import Errors
from corp_cli.method.keep import KeptUnits
from corp_cli.method.observe import Seen, joint_moments, observe, observe_cut, with_ridge
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import Stream, advance_dense, enter_block, start_streams
from corp_cli.models.adapter import hidden_units, mlp_weights, replace_mlp
from corp_cli.models.blocks import Block, MlpWeights
from corp_cli.models.streams import sublayers
from corp_cli.runtime import console

RIDGES = (0.01, 0.1, 1.0)  # λ, of which every round takes the best
ROUNDS = 6


@dataclass
class Sample:
    """Tokens of a branch, as many as `count`, drawn by `seed`, and its targets [B, ..., O] on every batch, on the host.

    Filled by `sampled`: inputs z [k, D], targets y [k, O], how often each counts, and whether its image is kept aside.
    """

    count: int
    seed: int
    tokens: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)


def sampled(every: Iterable[Seen], images: int, sample: Sample | None) -> Iterator[Seen]:
    """`every` batch of a set of so many `images`, as it is; `sample` takes its part on the way."""
    generator = torch.Generator().manual_seed(sample.seed if sample else 0)
    for seen in every:
        if sample:
            sample.tokens.append(draw(seen, sample.count / images, generator))
            sample.targets.append(seen.target.cpu())
        yield seen


def draw(seen: Seen, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(z, y, weights, aside) of about `share` tokens an image: the same however images were put into batches."""
    weights = seen.weights.flatten(1).double().cpu()
    chance = chances(weights, share)
    image, token = (torch.rand(weights.shape, generator=generator, dtype=torch.float64) < chance).nonzero(as_tuple=True)
    counted, there = (weights / chance)[image, token].float(), (image * weights.shape[1] + token).to(seen.target.device)
    z, y = (tensor.flatten(0, -2)[there].float() for tensor in (seen.given, seen.target))
    return z, y, counted.to(z.device), seen.aside[image.to(z.device)]


def chances(weights: Tensor, share: float) -> Tensor:
    """min(1, c w) of sum `share` for each image, [B, n]: w / chance then counts every token right on average."""
    ordered = weights.sort(-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)  # from each on
    left = share - torch.arange(weights.shape[1]).to(weights)  # how many are to be drawn, those before being sure
    sure = (ordered * left >= rest).cumprod(-1).sum(-1, keepdim=True)
    last = sure.clamp(max=weights.shape[1] - 1)
    per_weight = torch.where(sure == last, (left.expand_as(rest) / rest).gather(-1, last), torch.inf)
    return torch.where(weights > 0, (weights * per_weight).clamp(max=1), 0.0)


def fit_mlp(weights: MlpWeights, units: Units, sample: Sample, cfg: CompensationConfig) -> tuple[MlpWeights, Fit]:
    """`weights` with fc1 and fc2 refitted by Gauss-Newton to the tokens of images that are not kept aside."""
    z, y, counted, aside = map(torch.cat, zip(*sample.tokens, strict=True))
    width, biased = z.shape[1], weights.fc1_bias[0] is not None
    first = torch.stack(weights.fc1)
    if biased:
        biases = torch.stack([bias for bias in weights.fc1_bias if bias is not None])
        first, z = torch.cat([first, biases[..., None]], -1), torch.cat([z, torch.ones_like(z[:, :1])], 1)
    bias = weights.fc2.new_zeros(len(weights.fc2)) if weights.fc2_bias is None else weights.fc2_bias
    start = Layers(first.to(z), weights.fc2.to(z), bias.to(z))
    fitted, others = (Tokens(z[part], y[part], counted[part] / counted[part].sum()) for part in (~aside, aside))
    found, fit = gauss_newton(start, units, fitted, others, RIDGES, ROUNDS, cfg.ridge)
    if not fit.rounds:
        return weights, fit
    parts = found.first.to(weights.fc2)
    fc1_bias = tuple(part[:, width] for part in parts) if biased else weights.fc1_bias
    fc1, second = tuple(part[:, :width] for part in parts), found.second.to(weights.fc2)
    return MlpWeights(fc1, fc1_bias, second, found.bias.to(weights.fc2)), fit


def fit_block(
    stream: Stream, pruned: nn.Module, block: Block, weights: MlpWeights, sample: Sample, cfg: CompensationConfig
) -> Fit:
    """Put `weights`, refitted, into a block of `pruned`; all tokens of all images fit the final fc2."""
    fitted, fit = fit_mlp(weights, hidden_units(pruned, block), sample, cfg)
    replace_mlp(pruned, block, fitted)
    cut = sublayers(pruned, block)[1]
    moments = joint_moments(stream, cut, observe_cut(stream, cut, sample.targets)).every
    require_finite(block, BlockStatistics(hidden=moments))
    fc2, bias = refit(fitted.fc2, moments, cfg.ridge)
    replace_mlp(pruned, block, replace(fitted, fc2=fc2, fc2_bias=bias))
    return fit


@torch.no_grad()
def fit_every_mlp(
    dense: nn.Module,
    pruned: nn.Module,
    blocks: tuple[Block, ...],
    kept: tuple[KeptUnits, ...],
    errors: Errors,
    batches: Iterable[Tensor],
    cfg: CompensationConfig,
    seed: int,
) -> tuple[nn.Module, Errors]:
    """A copy of `pruned` in which every MLP that was cut is refitted, in one shot, by what the dense one is given and
    gives; `errors` with what came of it."""
    pruned, found = copy.deepcopy(pruned), [dict(error) for error in errors]
    stream = start_streams(dense, blocks, batches, cfg, seed)
    images = sum(map(len, stream.dense))
    for i, block in enumerate(console.track(blocks, "refit", len(blocks))):
        enter_block(stream, dense, block)
        attention, mlp = sublayers(dense, block)
        advance_dense(stream, attention)
        stream.pruned = list(stream.dense)  # x̂ = x
        units = kept[i].mlp
        if units is None or images == 1:
            advance_dense(stream, mlp)
            continue
        sample = Sample(cfg.fit_tokens, seed + i)
        joint = joint_moments(stream, mlp, sampled(observe(stream, mlp, cfg), images, sample))
        require_finite(block, BlockStatistics(hidden=joint.every))
        weights = mlp_weights(pruned, block)
        outputs = mlp.output.in_features + torch.arange(mlp.output.out_features)
        how = with_ridge(weights.fc2, joint, cfg, torch.cat([units.cpu(), outputs]).to(weights.fc2.device))
        fit = fit_block(stream, pruned, block, weights, sample, how)
        found[i]["mlp"] = replace(found[i]["mlp"], fit=fit)
    return pruned.eval(), tuple(found)
