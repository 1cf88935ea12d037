"""Merging of similar tokens by bipartite matching (Bolya et al., Token Merging, arXiv 2210.09461)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_tokens(x: Tensor, keys: Tensor, sizes: Tensor, prefix: int, count: int) -> tuple[Tensor, Tensor]:
    """(x̄ = Σ s x / Σ s over the tokens that are merged into one, Σ s), `count` tokens fewer.

    x [B, N, D], keys [B, N, d] by whose cosine tokens are compared, sizes s [B, N, 1]: how many tokens each stands for.
    Behind the first `prefix`, which stay, every second token looks for the most similar one of the others, and the most
    similar pairs are merged; where `count` is more than every second token, that is done again. Sums are products with
    a matrix of zeros and ones, so that the same tokens give the same bits on every run.
    """
    first, rest = x[:, :prefix], x[:, prefix:]
    columns = torch.cat([rest * sizes[:, prefix:], keys[:, prefix:] * sizes[:, prefix:], sizes[:, prefix:]], -1)
    count = min(count, columns.shape[1] - 1)  # of a smaller image there may be fewer
    while count > 0:
        at_once = min(count, columns.shape[1] // 2)
        kept, gone, into = match(columns[..., x.shape[-1] : -1], at_once)
        seeking, others = columns[:, ::2], columns[:, 1::2]
        columns = torch.cat([take(seeking, kept), others + into @ take(seeking, gone)], 1)
        count -= at_once
    sums, grown = columns[..., : x.shape[-1]], columns[..., -1:]
    return torch.cat([first, sums / grown], 1), torch.cat([sizes[:, :prefix], grown], 1)


def size_bias(sizes: Tensor) -> Tensor:
    """log s [B, 1, 1, N], added to the logits of keys that stand for s tokens each; sizes [B, N, 1]."""
    return sizes.log().transpose(1, 2)[:, None]


def match(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(kept [B, M - count], gone [B, count], into [B, N - M, count]) of the M = ⌈N / 2⌉ tokens at even places.

    keys [B, N, d] of any length. `into` is one where the token that goes is merged into the one at that odd place.
    """
    keys = torch.nn.functional.normalize(keys, dim=-1)
    similarity, partner = (keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)).max(-1)
    order = similarity.argsort(-1, descending=True)
    gone, kept = order[:, :count], order[:, count:].sort(-1).values
    places = torch.arange(keys.shape[1] // 2, device=keys.device)
    into = partner.gather(1, gone)[:, None] == places[None, :, None]
    return kept, gone, into.to(keys.dtype)


def take(tokens: Tensor, places: Tensor) -> Tensor:
    """tokens [B, N, D] at places [B, n] → [B, n, D]."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
