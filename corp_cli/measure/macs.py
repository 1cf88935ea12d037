"""Multiply-accumulates counted from shapes, on the meta device: nothing is computed and nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def _linear(out: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    return out.numel() * x.shape[-1]


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return out.numel() * math.prod(weight.shape[1:])


def _attention(out: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """QKᵀ and (softmax) V. Fused kernels hide both from counters that look at executed operators."""
    return (q.numel() + out.numel()) * k.shape[-2]


COUNTERS: dict[Any, Callable[..., int]] = {
    F.linear: _linear,
    F.conv2d: _convolution,
    F.scaled_dot_product_attention: _attention,
    torch.matmul: _linear,
    torch.bmm: _linear,
    Tensor.matmul: _linear,
    Tensor.__matmul__: _linear,
}


class _Counter(TorchFunctionMode):
    macs = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in COUNTERS:
            self.macs += COUNTERS[func](out, *args, **(kwargs or {}))
        return out


def count_macs(meta_model: nn.Module, input_size: Iterable[int]) -> int:
    """Σ over linear layers, convolutions and attention products of multiply-accumulates, for one image.

    `meta_model` has meta tensors; `input_size` is (C, H, W). FLOPs are twice this number. Normalisation, softmax and
    activations are not counted, as is the custom of the field.
    """
    return count_module(meta_model, torch.empty(1, *input_size, device="meta"))


@torch.no_grad()
def count_module(module: nn.Module, x: Tensor) -> int:
    """Multiply-accumulates of `module` for what `x`, on the meta device, holds."""
    with _Counter() as counter:
        module(x)
    return counter.macs
