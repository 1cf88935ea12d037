"""What calibration measures of each block: the input of ranking and compensation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from corp_cli.linalg.moments import Moments


@dataclass(frozen=True)
class LogitStatistics:
    """Second moments of queries and keys over all calibration tokens, float64.

    gram_q, gram_k [H, d, d]: E[qqᵀ], E[kkᵀ], not centred. gram_k_centred [H, d, d]: of keys less their mean over the
    tokens of one image, whose logits softmax cannot tell from those of the keys themselves. energy [H, d]:
    E[‖q_j‖²‖k_j‖²], norms over the tokens of one image, mean over images (Eq. 12). seen_q, seen_k [H, d, d]: E[r qqᵀ]
    and E[c (k - k̄)(k - k̄)ᵀ] by the weights of `logit_weights`, k̄ the mean of an image by c; None where unasked.
    """

    gram_q: Tensor
    gram_k: Tensor
    gram_k_centred: Tensor
    energy: Tensor
    seen_q: Tensor | None = None
    seen_k: Tensor | None = None

    def fitted(self, how: str) -> tuple[Tensor, Tensor]:
        """(G_Q, G_K) whose logits `how`, a choice of compensation.qk, comes nearest to."""
        if how == "weighted_lowrank" and self.seen_q is not None and self.seen_k is not None:
            return self.seen_q, self.seen_k
        return self.gram_q, self.gram_k_centred if "lowrank" in how else self.gram_k


@dataclass(frozen=True)
class BlockStatistics:
    """Statistics of one block; None for what the run does not need."""

    hidden: Moments | None = None  # input of mlp.fc2
    logits: LogitStatistics | None = None
    head_output: Moments | None = None  # input of attn.proj, heads side by side

    def to(self, device: torch.device) -> BlockStatistics:
        """The same on `device`."""
        return BlockStatistics(*(part and _moved(part, device) for part in vars(self).values()))


def _moved(part: Any, device: torch.device) -> Any:
    return replace(part, **{name: item.to(device) for name, item in vars(part).items() if isinstance(item, Tensor)})


Statistics = tuple[BlockStatistics, ...]  # one per block, first to last
