"""What the method sees of a model: its prunable blocks and their weights as plain tensors.

The stages read and write these; they never touch timm. Rows of q, k, v are head dimensions, as in a Linear weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # corp info reads sizes, and should not wait for torch

GROUPS = ("mlp", "qk", "vo", "heads")
ATTENTION_GROUPS = ("qk", "vo", "heads")
TOKENS = "tokens"  # beside the groups: how many of them a block passes on


@dataclass(frozen=True)
class Sizes:
    """Units of each group in one block: hidden channels, dimensions of a head, heads."""

    mlp: int
    qk: int
    vo: int
    heads: int


@dataclass(frozen=True)
class Block:
    """One transformer block: where its modules are, how large they are, and what cannot be pruned there.

    `attn` and `mlp` are module paths such as `blocks.0.attn`; `scale` multiplies the logits and stays that of the
    dense head; `refusals` maps a group to the reason why it cannot be pruned. Blocks of the same `place` see as many
    tokens, in windows of the same size. bare_logits: they are products of queries and keys, and nothing is added.
    """

    name: str
    attn: str
    mlp: str
    sizes: Sizes
    scale: float
    refusals: dict[str, str] = field(default_factory=dict)
    place: str = ""
    bare_logits: bool = True


@dataclass(frozen=True)
class AttentionWeights:
    """q, k [H, dq, D], v [H, dv, D], proj [O, H, dv]; biases [H, dq], [H, dq], [H, dv] (or None), proj bias [O].

    per_head: whatever else the attention has for every head, heads first, such as biases of relative positions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    proj: Tensor
    proj_bias: Tensor | None
    per_head: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MlpWeights:
    """fc1: one [d, D] weight (two with a gate, each giving one factor of the hidden units); fc2 [O, d]."""

    fc1: tuple[Tensor, ...]
    fc1_bias: tuple[Tensor | None, ...]
    fc2: Tensor
    fc2_bias: Tensor | None


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one block, in float64; attn or mlp is None where no group of it can be pruned."""

    attn: AttentionWeights | None
    mlp: MlpWeights | None
