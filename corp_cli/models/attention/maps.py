"""Attention maps as the kernel computes them: every bias, mask and rotation of a model is in them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AttentionMaps(TorchFunctionMode):
    """While in force, `found` collects softmax(scale · QKᵀ + mask) [B, N, N], mean over heads, of every attention.

    It sees what goes through PyTorch's scaled_dot_product_attention, as timm's attentions do unless told otherwise.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by PyTorch in place of `func`."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.found.append(_map(args[0], args[1], kwargs.get("attn_mask"), kwargs.get("scale")))
        return func(*args, **kwargs)


def _map(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if mask is not None:
        logits = logits + mask
    return logits.softmax(-1).mean(1)
