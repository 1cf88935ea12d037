"""Attention maps as they are computed: every bias, mask and rotation of a model is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)  # of attention that is not fused


def over_heads(maps: Tensor) -> Tensor:
    """[B, H, N, N] → the mean over heads, [B, N, N]."""
    return maps.mean(1)


class AttentionMaps(TorchFunctionMode):
    """While in force, `found` collects `of` softmax(scale · QKᵀ + mask) [B, H, N, N] of every attention.

    It sees what goes through PyTorch's scaled_dot_product_attention or softmax, as in all of timm's attentions. Those
    that put heads and images in one dimension give [B H, N, N].
    """

    def __init__(self, of: Callable[[Tensor], Tensor] = over_heads) -> None:
        super().__init__()
        self.of = of
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of `func`; what `func` calls itself does not come here."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.found.append(self.of(_map(args[0], args[1], kwargs.get("attn_mask"), kwargs.get("scale"))))
        out = func(*args, **kwargs)
        if func in SOFTMAX:
            self.found.append(self.of(out))
        return out


def _map(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if mask is not None:
        logits = logits + mask
    return logits.softmax(-1)
