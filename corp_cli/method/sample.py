"""Tokens that a layer is refitted to: drawn from those that it sees, those that count more with a higher chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from corp_cli.method.calibrate import accumulation_device
from corp_cli.method.observe import Seen
from corp_cli.method.stream import Stream
from corp_cli.runtime.scratch import Keep, on_host

# of some tokens: inputs z, targets y, how often they count, kept aside or not
Drawn = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class Sample:
    """Tokens of a branch, as many as `count`, drawn by `seed`, and its targets [B, ..., O] on every batch.

    keep: where they wait.
    Filled by `sampled`: inputs z [k, D], targets y [k, O], how often each counts, and whether its image is kept aside.
    """

    count: int
    seed: int
    keep: Keep = on_host
    tokens: list[Drawn] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)


def sampled(stream: Stream, every: Iterable[Seen], sample: Sample | None) -> Iterator[Seen]:
    """`every` batch of `stream`, as it is; `sample` takes its part on the way."""
    if sample is None:
        yield from every
        return
    for seen, tokens in drawn(stream, every, sample.count, sample.seed):
        z, y, counted, aside = map(sample.keep, tokens)
        sample.tokens.append((z, y, counted, aside))
        sample.targets.append(sample.keep(seen.target))
        yield seen


def drawn(stream: Stream, every: Iterable[Seen], count: int, seed: int) -> Iterator[tuple[Seen, Drawn]]:
    """`every` batch of `stream`, with what `seed` draws of it; about `count` tokens of all images.

    They are the same however images were put into batches, and among processes.
    """
    generator = torch.Generator().manual_seed(seed)
    for number, seen in enumerate(every):
        if number == 0:
            of_image = seen.weights.numel() // len(stream.aside[0])
            for _ in range(stream.before):  # whose numbers come first
                torch.rand(of_image, generator=generator, dtype=torch.float64)
        yield seen, draw(seen, count / stream.images, generator)


def draw(seen: Seen, share: float, generator: torch.Generator) -> Drawn:
    """About `share` tokens an image."""
    home = accumulation_device(seen.weights.device)
    weights = seen.weights.flatten(1).to(home).double()
    chance, chosen = chances(weights, share), torch.rand(weights.shape, generator=generator, dtype=torch.float64)
    image, token = (chosen.to(home) < chance).nonzero(as_tuple=True)
    there = (image * weights.shape[1] + token).to(seen.target.device)
    z, y = (tensor.flatten(0, -2)[there].float() for tensor in (seen.given, seen.target))
    return z, y, (weights / chance)[image, token].float().to(z.device), seen.aside[image.to(z.device)]


def chances(weights: Tensor, share: float) -> Tensor:
    """min(1, c w) of sum `share` for each image, [B, n]: w / chance then counts every token right on average."""
    ordered = weights.sort(-1, descending=True).values
    rest = ordered.flip(-1).cumsum(-1).flip(-1)  # from each on
    left = share - torch.arange(weights.shape[1]).to(weights)  # how many are to be drawn, those before being sure
    sure = (ordered * left >= rest).cumprod(-1).sum(-1, keepdim=True)
    last = sure.clamp(max=weights.shape[1] - 1)
    per_weight = torch.where(sure == last, (left.expand_as(rest) / rest).gather(-1, last), torch.inf)
    return torch.where(weights > 0, (weights * per_weight).clamp(max=1), 0.0)
