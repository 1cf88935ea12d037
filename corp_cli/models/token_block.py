"""Blocks of a classifier that work on fewer tokens: similar ones are merged, unread ones left alone in the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor, cat, nn

from corp_cli.linalg.merging import merge_tokens, size_bias
from corp_cli.models.adapter import block_weights, blocks_of, put_module, replace_attention
from corp_cli.models.attention.plain import PlainAttention
from corp_cli.models.blocks import Block
from corp_cli.models.offload import hand_over
from corp_cli.models.plain_block import PlainBlock, added, is_plain
from corp_cli.models.streams import read_tokens

LEAST_TOKENS = 0.125  # of the patches, this fraction is not merged away


class TokenBlock(PlainBlock):
    """A block of timm that merges `merge` tokens behind its attention, or updates only the first `updated_tokens`.

    Once tokens were merged the stream is [B, N, D + 1] until the block that is `last`: its last channel holds how many
    tokens s each stands for, log s is added to their logits, and one that stands for many is attended to as they were
    (arXiv 2210.09461). The first `prefix` tokens are never merged. Tokens that are not updated pass as they came, and
    give keys and values all the same: a head that reads no others has the same outputs. The modules of the block keep
    their names.
    """

    def __init__(self, block: nn.Module, prefix: int, merge: int, updated_tokens: int | None, last: bool) -> None:
        """Takes over the modules of `block`, whose attention is a PlainAttention."""
        super().__init__(block)
        assert isinstance(self.attn, PlainAttention)
        self.prefix, self.merge, self.last = prefix, merge, last
        self.updated_tokens = self.attn.updated_tokens = updated_tokens

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, D] or [B, N, D + 1] → [B, N - merge, D or D + 1]."""
        width, sizes = self.attn.proj.out_features, None
        if x.shape[-1] > width:
            x, sizes = x[..., :width], x[..., width:]
            bias = size_bias(sizes)
            attn_mask = bias if attn_mask is None else attn_mask + bias
        q, k, v = self.attn.heads(self.norm1(x))
        count = x.shape[1] if self.updated_tokens is None else self.updated_tokens
        read, others = x[:, :count], x[:, count:]
        read = added(read, self.attn.attend(q, k, v, attn_mask, is_causal), self.ls1, self.drop_path1)
        if self.merge > 0:
            sizes = x.new_ones(*x.shape[:2], 1) if sizes is None else sizes
            read, sizes = merge_tokens(read, k.mean(1), sizes, self.prefix, self.merge)
        read = added(read, self.mlp(self.norm2(read)), self.ls2, self.drop_path2)
        x = cat([read, others], 1)
        return x if sizes is None or self.last else cat([x, sizes], -1)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"merge={self.merge}, updated_tokens={self.updated_tokens}"


def needed_tokens(model: nn.Module) -> int:
    """How many leading tokens the last block must update for the head; 0: all, or the block is not one to split."""
    last = blocks_of(model)[-1]
    plain = is_plain(model.get_submodule(last.name))
    return read_tokens(model) if plain and last.sizes.heads > 0 else 0


def prefix_tokens(model: nn.Module) -> int:
    """How many tokens stand before the patches: class token, distillation token, registers."""
    timm_model: Any = model
    return int(timm_model.num_prefix_tokens)


def all_tokens(model: nn.Module) -> int:
    """How many tokens a model of plain blocks has, prefix and patches; 0 for one whose blocks are not split."""
    patches: Any = getattr(getattr(model, "patch_embed", None), "num_patches", None) if needed_tokens(model) else None
    return prefix_tokens(model) + patches if patches else 0


def most_merged(model: nn.Module) -> int:
    """How many tokens may be merged: of a model of plain blocks only, whose head reads nothing but leading tokens."""
    blocks = blocks_of(model)
    plain = all(is_plain(model.get_submodule(b.name)) and b.sizes.heads > 0 for b in blocks)
    plain = plain and len(blocks) > 1  # the last merges none
    patches: Any = getattr(model.get_submodule("patch_embed"), "num_patches", None) if plain else None
    return int((1 - LEAST_TOKENS) * patches) if patches and read_tokens(model) > 0 else 0


def spare_tokens(model: nn.Module, merge: tuple[int, ...], updated_tokens: int | None) -> None:
    """Let block i merge merge[i] tokens (none: an empty tuple), and the last update only the first `updated_tokens`."""
    blocks = blocks_of(model)
    for i, block in enumerate(blocks):
        last = block == blocks[-1]
        if any(merge[: i + 1]) or (last and updated_tokens is not None):
            _spare(model, block, merge[i] if merge else 0, updated_tokens if last else None, last)


def put_token_blocks(model: nn.Module) -> None:
    """Make every block one that could merge tokens, and merges none; the last updates only what the head reads."""
    blocks, needed = blocks_of(model), needed_tokens(model) or None
    for block in blocks:
        last = block == blocks[-1]
        _spare(model, block, 0, needed if last else None, last)


def _spare(model: nn.Module, block: Block, merge: int, updated_tokens: int | None, last: bool) -> None:
    attn = block_weights(model, block).attn
    assert attn is not None
    replace_attention(model, block, attn)
    put_token_block(model, block, merge, updated_tokens, last)


def mean_keys(model: nn.Module, block: Block, normed: Tensor) -> Tensor:
    """The keys of a block, mean over heads, [B, N, d], from the input of its attention: what tokens are merged by."""
    attn = model.get_submodule(block.attn)
    assert isinstance(attn, PlainAttention)
    return attn.heads(normed)[1].mean(1)


def put_token_block(model: nn.Module, block: Block, merge: int, updated_tokens: int | None, last: bool) -> None:
    """Put a TokenBlock in the place of `block`, whose attention is a PlainAttention already."""
    module = model.get_submodule(block.name)
    new = TokenBlock(module, prefix_tokens(model), merge, updated_tokens, last)
    hand_over(module, new)
    put_module(model, block.name, new.train(module.training))
