"""softmax(QKᵀ) V with its maps, which PyTorch's own attention keeps to itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED = 8  # a row that is no multiple of it is multiplied at a fraction of the speed on a GPU


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(P = softmax(scale · QKᵀ + `added`) [..., N, M + padding], PV [..., N, dv]): P is zero behind the M keys.

    q [..., N, d], k [..., M, d], v [..., M, dv]; `added` goes with [..., N, M]; of bools, it says what is seen.
    """
    keys, padding = k.shape[-2], filled_up(k)
    k, v = (pad(x, (0, 0, 0, padding)) for x in (k, v))
    logits = (scale * q) @ k.mT
    if added is not None:
        seen = logits[..., :keys]
        seen.masked_fill_(~added, -torch.inf) if added.dtype == torch.bool else seen.add_(added)
    if padding:
        logits[..., keys:] = -torch.inf
    # not torch.softmax, by which attention is known where its maps are watched
    P = torch.special.softmax(logits, -1)
    return P, P @ v


def filled_up(k: Tensor) -> int:
    """How many tokens k [..., M, d] lacks to be multiplied fast."""
    return -k.shape[-2] % ALIGNED if k.is_cuda else 0
