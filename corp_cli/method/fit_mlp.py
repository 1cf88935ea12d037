"""Stage 3, the MLP in front of its nonlinearity: the kept channels are refitted too, as far as other images agree.

A tenth of the images is kept aside: their error decides how many rounds of Gauss-Newton are worth it, with which λ, and
whether the layer is left alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from corp_cli.config.prune import CompensationConfig
from corp_cli.linalg.attention import ALIGNED
from corp_cli.linalg.fit import Fit
from corp_cli.linalg.gauss_newton import Layers, Tokens, Units, gauss_newton
from corp_cli.linalg.moments import Moments
from corp_cli.linalg.ridge import refit
from corp_cli.linalg.rounding import rounds_products
from corp_cli.measure.precision import searches_in_bfloat16
from corp_cli.method.calibrate import require_finite
from corp_cli.method.observe import joint_moments, observe_cut
from corp_cli.method.sample import Drawn, Sample
from corp_cli.method.statistics import BlockStatistics
from corp_cli.method.stream import Stream
from corp_cli.models.adapter import hidden_units, replace_mlp
from corp_cli.models.blocks import Block, MlpWeights
from corp_cli.models.streams import sublayers
from corp_cli.runtime import ranks

RIDGES = (0.01, 0.1, 1.0)  # λ, of which every round takes the best
LARGE = 2**16  # weights in front of the nonlinearity, for which bfloat16 saves a CPU more than rounding takes
ROUNDS = {"sequential": 6, "none": 4}  # at most; what is repaired in one shot is to be there soon


def fit_mlp(
    weights: MlpWeights, units: Units, tokens: list[Drawn], cfg: CompensationConfig, device: torch.device
) -> tuple[MlpWeights, Fit]:
    """`weights` with fc1 and fc2 refitted by Gauss-Newton, on `device`, to tokens of images that are not kept aside."""
    z, y, counted, aside = map(torch.cat, zip(*tokens, strict=True))
    width, biased = z.shape[1], weights.fc1_bias[0] is not None
    first = torch.stack(weights.fc1)
    if biased:
        biases = torch.stack([bias for bias in weights.fc1_bias if bias is not None])
        padding = -(width + 1) % ALIGNED
        first = torch.nn.functional.pad(torch.cat([first, biases[..., None]], -1), (0, padding))
        z = torch.nn.functional.pad(torch.cat([z, torch.ones_like(z[:, :1])], 1), (0, padding))
    bias = weights.fc2.new_zeros(len(weights.fc2)) if weights.fc2_bias is None else weights.fc2_bias
    start = Layers(*(part.to(device, z.dtype) for part in (first, weights.fc2, bias)))
    fitted, others = (
        Tokens(z[part].to(device), y[part].to(device), (counted[part] / counted[part].sum()).to(device))
        for part in (~aside, aside)
    )
    rounds, coarse = ROUNDS[cfg.propagate], coarse_for(start)
    found, fit = gauss_newton(start, units, fitted, others, RIDGES, rounds, cfg.ridge, coarse)
    if not fit.rounds:
        return weights, fit
    parts = found.first.to(weights.fc2)
    fc1_bias = tuple(part[:, width] for part in parts) if biased else weights.fc1_bias
    fc1, second = tuple(part[:, :width] for part in parts), found.second.to(weights.fc2)
    return MlpWeights(fc1, fc1_bias, second, found.bias.to(weights.fc2)), fit


def coarse_for(layers: Layers) -> torch.dtype | None:
    """What steps are looked for in, where the device of `layers` halves the time by it: they are as good.

    A GPU does so where it rounds products anyway, a CPU for large layers.
    """
    device, large = layers.first.device, layers.first.numel() >= LARGE
    halves = large and searches_in_bfloat16() if device.type == "cpu" else rounds_products(device)
    return torch.bfloat16 if halves else None


def fit_block(
    stream: Stream,
    pruned: nn.Module,
    block: Block,
    weights: MlpWeights,
    sample: Sample,
    cfg: CompensationConfig,
    before: Moments | None = None,
) -> Fit:
    """Put `weights`, refitted, into a block of `pruned`; all tokens of all images fit the final fc2.

    before: moments of what goes into fc2, and of what should come out, with fc1 as it is in `weights`, if at hand.
    """
    tokens = [drawn for own in ranks.gathered(sample.tokens) for drawn in own]
    fitted, fit = ranks.once(fit_mlp, weights, hidden_units(pruned, block), tokens, cfg, stream.device)
    replace_mlp(pruned, block, fitted)
    cut = sublayers(pruned, block)[1]
    if before is None or fit.rounds:
        before = joint_moments(stream, cut, observe_cut(stream, cut, sample.targets)).every
    require_finite(block, BlockStatistics(hidden=before))
    fc2, bias = ranks.once(refit, fitted.fc2, before, cfg.ridge)
    replace_mlp(pruned, block, replace(fitted, fc2=fc2, fc2_bias=bias))
    return fit
