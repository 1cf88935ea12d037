"""The attention of a pruned EVA block: queries and keys are turned by the positions of their tokens."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor

from corp_cli.models.attention.plain import PrunedAttention
from corp_cli.models.spec import AttentionSizes


class RotaryAttention(PrunedAttention):
    """softmax(scale · R(Q) R(K)ᵀ) V: R rotates pairs of dimensions, so that q and k keep their dense width.

    Takes the place of timm's EvaAttention and AttentionRope. Where the rotation differs from head to head, the model
    passes that of all dense heads; `dense_heads` says which of them are here.
    """

    PER_HEAD: ClassVar[dict[str, int]] = {"dense_heads": 0}

    def __init__(self, dense: Any, sizes: AttentionSizes) -> None:
        """`dense` is the attention replaced."""
        super().__init__(dense, sizes)
        self.num_prefix_tokens, self.rotate_half = dense.num_prefix_tokens, dense.rotate_half
        self.dense_heads: Tensor
        self.register_buffer("dense_heads", torch.arange(sizes.heads, device=self.proj.weight.device))

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """x [B, N, D], rope [N', 2 dq] or [H dense, N', 2 dq] for the N' tokens that have a place → [B, N, O]."""
        q, k, v = self.heads(x)
        if rope is not None:
            rope = rope[self.dense_heads] if rope.ndim == 3 else rope
            q, k = self.rotate(q, rope).type_as(v), self.rotate(k, rope).type_as(v)
        return self.attend(q, k, v, attn_mask, is_causal)

    def rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """R(x) for x [B, H, N, dq]; the prefix tokens have no place and stay."""
        prefix, placed = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        return torch.cat([prefix, apply_rot_embed_cat(placed, rope, half=self.rotate_half)], 2)
