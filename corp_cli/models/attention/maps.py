"""Attention maps as they are computed: every bias, mask and rotation of a model is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from corp_cli.linalg.logits import filled_up

QKV = "query", "key", "value"
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
            q, k, v = (kwargs.get(name, value) for name, value in zip(QKV, (*args[:3], None, None, None), strict=False))
            maps, out = _attended(q, k, v, kwargs.get("attn_mask"), kwargs.get("scale"))
            self.found.append(self.of(maps))
            if not (
                len(args) > 3 or kwargs.keys() - {*QKV, "attn_mask", "scale", "dropout_p"} or kwargs.get("dropout_p")
            ):
                return out  # what it would give, without working out the maps again
        out = func(*args, **kwargs)
        if func in SOFTMAX:
            self.found.append(self.of(out))
        return out


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """(P = softmax(scale · QKᵀ + mask), PV)."""
    n = k.shape[-2]
    if padding := filled_up(k):  # tokens that nobody reads
        k, v = (F.pad(x, (0, 0, 0, padding)) for x in (k, v))
    logits = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if mask is not None:
        seen = logits[..., :n]
        seen.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else seen.add_(mask)
    if padding:
        logits[..., n:] = -torch.inf
    maps = logits.softmax(-1)
    return maps[..., :n], maps @ v
