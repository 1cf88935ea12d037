"""The last block of a classifier, without the work on tokens that its head never reads."""

from __future__ import annotations

from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor, cat, nn

from corp_cli.models.adapter import block_weights, blocks_of, replace_attention
from corp_cli.models.attention import PrunedAttention
from corp_cli.models.blocks import Block
from corp_cli.models.streams import read_tokens


class ReadBlock(nn.Module):
    """A block of timm that updates only the first `tokens` of its stream; the others pass as they came.

    Every token still gives a key and a value, so the first tokens become what the whole block makes of them: a model
    whose head reads no others has the same outputs. The modules of the block keep their names.
    """

    def __init__(self, block: nn.Module, tokens: int) -> None:
        """Takes over the modules of `block`, whose attention is a PrunedAttention."""
        super().__init__()
        self.norm1, attn, self.ls1, self.drop_path1 = map(block.get_submodule, ("norm1", "attn", "ls1", "drop_path1"))
        self.norm2, self.mlp, self.ls2, self.drop_path2 = map(
            block.get_submodule, ("norm2", "mlp", "ls2", "drop_path2")
        )
        assert isinstance(attn, PrunedAttention)
        self.attn, self.tokens = attn, tokens
        attn.queries = tokens

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, N, D] → [B, N, D]."""
        read, others = x[:, : self.tokens], x[:, self.tokens :]
        read = read + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask, is_causal)))
        read = read + self.drop_path2(self.ls2(self.mlp(self.norm2(read))))
        return cat([read, others], 1)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"tokens={self.tokens}"


def needed_tokens(model: nn.Module) -> int:
    """How many leading tokens the last block must update for the head; 0: all, or the block is not one to split."""
    last = blocks_of(model)[-1]
    plain = type(model.get_submodule(last.name)) is TimmBlock
    return read_tokens(model) if plain and last.sizes.heads > 0 else 0


def skip_unread(model: nn.Module, tokens: int) -> None:
    """Let the last block update only the first `tokens`, with the weights it has."""
    last = blocks_of(model)[-1]
    attn = block_weights(model, last).attn
    assert attn is not None
    replace_attention(model, last, attn)
    put_read_block(model, last, tokens)


def put_read_block(model: nn.Module, block: Block, tokens: int) -> None:
    """Put a ReadBlock in the place of `block`, whose attention is a PrunedAttention already."""
    parent, _, name = block.name.rpartition(".")
    module = model.get_submodule(block.name)
    setattr(model.get_submodule(parent), name, ReadBlock(module, tokens).train(module.training))
