"""The attention of a pruned block of Segment Anything's encoder: its tokens lie on a grid."""

from __future__ import annotations

from typing import Any

from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias
from torch import Tensor

from corp_cli.models.attention.plain import PrunedAttention
from corp_cli.models.spec import AttentionSizes


class GridAttention(PrunedAttention):
    """softmax(scale · QKᵀ + Q·r) V, r a vector for every relative row and column, the same for all heads.

    Takes the place of the Attention of timm's vision_transformer_sam. The bias is a product with the queries, which
    therefore keep their dense width. With rotary positions in place of r, so do they.
    """

    def __init__(self, dense: Any, sizes: AttentionSizes) -> None:
        """`dense` is the attention replaced; relative and rotary positions are taken over from it."""
        super().__init__(dense, sizes)
        self.use_rel_pos = dense.use_rel_pos
        if dense.use_rel_pos:
            self.rel_pos_h, self.rel_pos_w = dense.rel_pos_h, dense.rel_pos_w
        self.rope = dense.rope

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, W, D] → [B, H, W, O]."""
        grid, bias = x.shape[1:3], None
        q, k, v = self.heads(x.flatten(1, 2))
        if self.use_rel_pos:
            bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, grid, grid)
            bias = bias.unflatten(0, (-1, self.num_heads))
        elif self.rope is not None:
            rope = self.rope.get_embed()
            q, k = (apply_rot_embed_cat(t, rope).type_as(v) for t in (q, k))
        return self.attend(q, k, v, bias).unflatten(1, grid)
