"""The attention modules of pruned blocks: number of heads, q/k width, v width and scale are free."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._trace import is_tracing

from corp_cli.models.spec import AttentionSizes

# torch < 2.7 cannot tell torch.export from torch.compile
is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


def applied(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), which is not called where it does nothing: at batch 1 a GPU waits for every call."""
    idle = isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and not module.training)
    out: Tensor = x if idle else module(x)
    return out


class PrunedAttention(nn.Module):
    """softmax(scale · QKᵀ) V for H heads with q, k of width `qk_dim` and v of width `v_dim`, then proj.

    Takes the place of timm's attention, in whose forward the scale is implied by the head width: after pruning that
    would silently change the temperature, so here it is stored and passed on. Queries, keys and values come from one
    Linear with rows ordered q, k, v and by head within each, as in timm. What is done to them before the product, and
    what a block passes along, differs: every kind of attention has a class with a `forward` of its own.
    """

    PER_HEAD: ClassVar[dict[str, int]] = {}  # tensors with an entry for every head → which of their dimensions it is

    def __init__(self, dense: Any, sizes: AttentionSizes) -> None:
        """`dense` is the attention replaced: norms and dropouts are taken over from it as they are."""
        super().__init__()
        self.num_heads, self.qk_dim, self.v_dim, self.scale = sizes.heads, sizes.qk, sizes.vo, sizes.scale
        self.head_dim, self.fused_attn = sizes.vo, True  # as timm's attention says it
        # only so many leading tokens ask and are answered; None: all
        self.updated_tokens: int | None = getattr(dense, "updated_tokens", None)
        like = {"device": dense.proj.weight.device, "dtype": dense.proj.weight.dtype}
        inputs = (dense.q_proj if dense.qkv is None else dense.qkv).in_features
        rows, outputs = sizes.heads * (2 * sizes.qk + sizes.vo), sizes.heads * sizes.vo
        self.qkv = nn.Linear(inputs, rows, bias=sizes.qkv_bias, **like)
        self.q_norm, self.k_norm = (getattr(dense, name, nn.Identity()) for name in ("q_norm", "k_norm"))
        self.attn_drop = dense.attn_drop
        self.norm = getattr(dense, "norm", nn.Identity())
        self.proj = nn.Linear(outputs, dense.proj.out_features, bias=sizes.proj_bias, **like)
        self.proj_drop = dense.proj_drop

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, D] → q, k [B, H, N, dq], normed where the attention does so, and v [B, H, N, dv]."""
        q, k, v = [t.view(t.shape[0], t.shape[1], self.num_heads, -1).transpose(1, 2) for t in self.project(x)]
        return applied(self.q_norm, q), applied(self.k_norm, k), v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """proj(softmax(scale · QKᵀ + attn_mask) V), [B, N, O]; a mask has rows for all tokens, or one for all alike."""
        if self.updated_tokens is not None and attn_mask is not None:
            attn_mask = attn_mask[..., : self.updated_tokens, :]
        if q.device.type == "cpu" and self.qk_dim != self.v_dim and not (is_exporting() or is_tracing()):
            # PyTorch's fast CPU kernel wants equal widths; zeros change nothing and cost less than its slow path.
            # A graph that is exported runs elsewhere, where they would cost time.
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
        )
        if out.shape[-1] > self.v_dim:
            out = out[..., : self.v_dim]
        return applied(self.proj_drop, self.proj(applied(self.norm, out.transpose(1, 2).flatten(2))))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, N, D] → q [B, `updated_tokens` or N, H dq], k [B, N, H dq], v [B, N, H dv]."""
        qk, vo = self.num_heads * self.qk_dim, self.num_heads * self.v_dim
        if self.updated_tokens is None:
            q, k, v = self.qkv(x).split([qk, qk, vo], dim=-1)
            return q, k, v
        weight, bias = self.qkv.weight, self.qkv.bias
        q = F.linear(x[:, : self.updated_tokens], weight[:qk], None if bias is None else bias[:qk])
        k, v = F.linear(x, weight[qk:], None if bias is None else bias[qk:]).split([qk, vo], dim=-1)
        return q, k, v

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        return f"num_heads={self.num_heads}, qk_dim={self.qk_dim}, v_dim={self.v_dim}, scale={self.scale:.6g}"


class PlainAttention(PrunedAttention):
    """softmax(scale · QKᵀ) V and nothing else; the Attention of timm's VisionTransformer."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, D] → [B, N, O], or [B, `updated_tokens`, O] where only those ask."""
        return self.attend(*self.heads(x), attn_mask, is_causal)
