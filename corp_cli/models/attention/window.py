"""Attentions of pruned blocks whose logits hold a bias for the relative position of two tokens: BEiT, Swin, SwinV2."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corp_cli.models.attention.plain import PrunedAttention
from corp_cli.models.spec import AttentionSizes


def place_bias(table: Tensor, index: Tensor) -> Tensor:
    """table [places, H], index [N, N] → bias [1, H, N, N] of the logits."""
    return table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)[None]


def add_mask(bias: Tensor, mask: Tensor | None, batch: int) -> Tensor:
    """bias [1, H, N, N] + mask [W, N, N] of the W windows of an image → [1 or batch, H, N, N]."""
    if mask is None:
        return bias
    windows = mask.shape[0]
    return (bias + mask[:, None]).expand(batch // windows, windows, -1, -1, -1).flatten(0, 1)


class TableAttention(PrunedAttention):
    """softmax(scale · QKᵀ + b) V, b from a table of one value per head and relative position."""

    PER_HEAD: ClassVar[dict[str, int]] = {"relative_position_bias_table": 1}

    def __init__(self, dense: Any, sizes: AttentionSizes) -> None:
        """`dense` is the attention replaced; the table has room for the heads that stay."""
        super().__init__(dense, sizes)
        table = dense.relative_position_bias_table.detach()
        self.relative_position_bias_table = nn.Parameter(table.new_zeros(len(table), sizes.heads))
        self.relative_position_index: Tensor
        self.register_buffer("relative_position_index", dense.relative_position_index, persistent=False)

    def bias(self) -> Tensor:
        """[1, H, N, N]."""
        return place_bias(self.relative_position_bias_table, self.relative_position_index)


class BiasedAttention(TableAttention):
    """softmax(scale · QKᵀ + b) V over all tokens; BEiT's Attention."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """x [B, N, D] → [B, N, O]; the shared bias is one of the model for all of its blocks."""
        bias = self.bias()
        if shared_rel_pos_bias is not None:
            bias = bias + shared_rel_pos_bias
        return self.attend(*self.heads(x), bias)


class WindowAttention(TableAttention):
    """softmax(scale · QKᵀ + b + mask) V inside of windows; Swin's WindowAttention."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B W, N, D], mask [W, N, N] → [B W, N, O]."""
        return self.attend(*self.heads(x), add_mask(self.bias(), mask, x.shape[0]))


class CosineAttention(PrunedAttention):
    """softmax(τ cos(Q, K) + b + mask) V inside of windows, τ and b by head; SwinV2's WindowAttention.

    q and k are normed over all of their dimensions and keep their dense width. A small MLP makes b of the positions.
    """

    PER_HEAD: ClassVar[dict[str, int]] = {"logit_scale": 0, "cpb_mlp.2.weight": 0}

    def __init__(self, dense: Any, sizes: AttentionSizes) -> None:
        """`dense` is the attention replaced; the scales, and the last layer of the MLP, are those of fewer heads."""
        super().__init__(dense, sizes)
        self.logit_scale = nn.Parameter(dense.logit_scale.detach().new_zeros(sizes.heads, 1, 1))
        first, act, last = dense.cpb_mlp
        like = {"device": last.weight.device, "dtype": last.weight.dtype}
        self.cpb_mlp = nn.Sequential(first, act, nn.Linear(last.in_features, sizes.heads, bias=False, **like))
        self.relative_coords_table: Tensor
        self.relative_position_index: Tensor
        for name in ("relative_coords_table", "relative_position_index"):
            self.register_buffer(name, getattr(dense, name), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B W, N, D], mask [W, N, N] → [B W, N, O]."""
        q, k, v = self.heads(x)
        temperature = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        table = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        bias = 16 * torch.sigmoid(place_bias(table, self.relative_position_index))
        q = temperature * F.normalize(q, dim=-1)
        return self.attend(q, F.normalize(k, dim=-1), v, add_mask(bias, mask, x.shape[0]))
