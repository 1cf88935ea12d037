"""Attention maps as they are computed: every bias, mask and rotation of a model is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from corp_cli.linalg.attention import attended

QKV = "query", "key", "value"
MAPS = 2**26  # values of attention maps that are worked on together
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
            out = self._attend(q, k, v, kwargs.get("attn_mask"), kwargs.get("scale"))
            others = [value for name, value in kwargs.items() if name not in (*QKV, "attn_mask", "scale")]
            if len(args) <= 3 and not any(others):  # dropout, causal, of grouped heads: not in these maps
                return out  # what it would give, without working out the maps again
        out = func(*args, **kwargs)
        if func in SOFTMAX:
            self.found.append(self.of(out))
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """PV, by as many images at a time as `MAPS` allows where every image has maps of its own."""
        step, keys = len(q), k.shape[-2]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self.of is over_heads:
            step = max(1, MAPS // (q.shape[:-1].numel() // len(q) * keys))
        found, outs = [], []
        for start in range(0, len(q), step):
            part = slice(start, start + step)
            own = mask[part] if mask is not None and mask.ndim == q.ndim and len(mask) == len(q) else mask
            maps, out = attended(q[part], k[part], v[part], scale, own)
            found.append(self.of(maps[..., :keys]))
            outs.append(out)
        self.found.append(torch.cat(found) if len(found) > 1 else found[0])
        return torch.cat(outs) if len(outs) > 1 else outs[0]
