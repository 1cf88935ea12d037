"""The attention module of a pruned block: number of heads, q/k width, v width and scale are free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class AttentionSizes:
    """Heads, width of q and k, width of v, what multiplies the logits, and which Linear has a bias."""

    heads: int
    qk: int
    vo: int
    scale: float
    qkv_bias: bool
    proj_bias: bool


class PrunedAttention(nn.Module):
    """softmax(scale · QKᵀ) V for H heads with q, k of width `qk_dim` and v of width `v_dim`, then proj.

    Takes the place of timm's Attention, in whose forward the scale is implied by the head width: after pruning that
    would silently change the temperature, so here it is stored and passed on. Queries, keys and values come from one
    Linear with rows ordered q, k, v and by head within each, as in timm.
    """

    def __init__(self, dense: Any, sizes: AttentionSizes) -> None:
        """`dense` is the attention replaced: norms and dropouts are taken over from it as they are."""
        super().__init__()
        self.num_heads, self.qk_dim, self.v_dim, self.scale = sizes.heads, sizes.qk, sizes.vo, sizes.scale
        like = {"device": dense.qkv.weight.device, "dtype": dense.qkv.weight.dtype}
        rows, outputs = sizes.heads * (2 * sizes.qk + sizes.vo), sizes.heads * sizes.vo
        self.qkv = nn.Linear(dense.qkv.in_features, rows, bias=sizes.qkv_bias, **like)
        self.q_norm, self.k_norm = dense.q_norm, dense.k_norm
        self.attn_drop = dense.attn_drop
        self.norm = getattr(dense, "norm", nn.Identity())
        self.proj = nn.Linear(outputs, dense.proj.out_features, bias=sizes.proj_bias, **like)
        self.proj_drop = dense.proj_drop

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, D] → [B, N, O]."""
        batch, tokens, _ = x.shape
        qk, vo = self.num_heads * self.qk_dim, self.num_heads * self.v_dim
        q, k, v = self.qkv(x).split([qk, qk, vo], dim=-1)
        q, k, v = (t.reshape(batch, tokens, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if x.device.type == "cpu" and self.qk_dim != self.v_dim:
            # PyTorch's fast CPU kernel wants equal widths; zeros change nothing and cost less than its slow path.
            width = max(self.qk_dim, self.v_dim)
            q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            is_causal=is_causal,
            scale=self.scale,
        )[..., : self.v_dim]
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, vo))
        projected: Tensor = self.proj_drop(self.proj(out))
        return projected

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"num_heads={self.num_heads}, qk_dim={self.qk_dim}, v_dim={self.v_dim}, scale={self.scale:.6g}"
