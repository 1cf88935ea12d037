"""Tokens that a layer is refitted to: drawn from those that it sees, those that count more with a higher chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from corp_cli.method.observe import Seen
from corp_cli.runtime.scratch import Keep, on_host


@dataclass
class Sample:
    """Tokens of a branch, as many as `count`, drawn by `seed`, and its targets [B, ..., O] on every batch, on the host.

    keep: where targets wait.
    Filled by `sampled`: inputs z [k, D], targets y [k, O], how often each counts, and whether its image is kept aside.
    """

    count: int
    seed: int
    keep: Keep = on_host
    tokens: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)


def sampled(every: Iterable[Seen], images: int, sample: Sample | None) -> Iterator[Seen]:
    """`every` batch of a set of so many `images`, as it is; `sample` takes its part on the way."""
    generator = torch.Generator().manual_seed(sample.seed if sample else 0)
    for seen in every:
        if sample:
            z, y, weights, aside = draw(seen, sample.count / images, generator)
            sample.tokens.append((z.cpu(), y.cpu(), weights.cpu(), aside.cpu()))
            sample.targets.append(sample.keep(seen.target))
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
