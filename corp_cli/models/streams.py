"""The residual stream of a model, sublayer by sublayer: what the sequential stage walks along. Does no maths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.models.blocks import Block


class _ReachedError(Exception):
    """Ends a forward pass once the first block has been reached."""


def tokens(model: nn.Module, images: Tensor) -> Tensor:
    """images [B, C, H, W] → the input [B, N, D] of the first block."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0])
        raise _ReachedError

    handle = cast(nn.Sequential, model.blocks)[0].register_forward_pre_hook(stop)
    try:
        model(images)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    return found[0]


def head(model: nn.Module, stream: Tensor) -> Tensor:
    """The output [B, N, D] of the last block → logits."""
    timm_model: Any = model
    logits: Tensor = timm_model.forward_head(timm_model.norm(stream))
    return logits


@dataclass(frozen=True)
class Sublayer:
    """One residual branch: stream ← stream + post(module(pre(stream))), and its last linear layer `output`.

    `gain` is what `post` multiplies the output with: a vector [D], 1.0, or None where it is not an elementwise scale.
    """

    pre: Callable[[Tensor], Tensor]
    module: nn.Module
    post: Callable[[Tensor], Tensor]
    output: nn.Linear
    gain: Tensor | float | None

    def branch(self, stream: Tensor) -> Tensor:
        """module(pre(stream)): what the branch adds, before `post`."""
        out: Tensor = self.module(self.pre(stream))
        return out


def sublayers(model: nn.Module, block: Block) -> tuple[Sublayer, Sublayer]:
    """The attention and the MLP branch of a block, with the modules that are in place now.

    Raises CorpError for blocks whose order of norms and branches is not known.
    """
    module: Any = model.get_submodule(block.name)
    if isinstance(module, TimmBlock):
        branches = ((module.norm1, module.ls1), (module.norm2, module.ls2))
    elif isinstance(module, ResPostBlock):
        branches = ((nn.Identity(), module.norm1), (nn.Identity(), module.norm2))
    else:
        raise CorpError(
            f"{block.name} is a {type(module).__name__}, which cannot be repaired block by block; "
            "set compensation.propagate=none."
        )
    attn, mlp = (
        Sublayer(pre, part, post, last, _gain(post))
        for (pre, post), part, last in zip(
            branches, (module.attn, module.mlp), (module.attn.proj, module.mlp.fc2), strict=True
        )
    )
    return attn, mlp


def _gain(post: nn.Module) -> Tensor | float | None:
    if isinstance(post, nn.Identity):
        return 1.0
    return post.gamma.detach() if isinstance(post, LayerScale) else None


@contextmanager
def input_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """While in force, the list holds the last input of `module`."""
    seen: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[:] = [args[0]]

    handle = module.register_forward_pre_hook(take)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """While in force, the list holds the last output of `module`."""
    seen: list[Tensor] = []

    def take(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen[:] = [output]

    handle = module.register_forward_hook(take)
    try:
        yield seen
    finally:
        handle.remove()


def read_tokens(model: nn.Module) -> int:
    """How many leading tokens the head reads: 1, 2 with a distillation token, 0 when it pools over all."""
    timm_model: Any = model
    if getattr(timm_model, "global_pool", "") != "token" or not getattr(timm_model, "num_prefix_tokens", 0):
        return 0
    return 2 if hasattr(timm_model, "dist_token") else 1


@torch.no_grad()
def logits_from(model: nn.Module, stream: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    """Logits from the input [B, N, D] of the first of `blocks`, which must be the last ones of the model."""
    for block in blocks:
        stream = model.get_submodule(block.name)(stream)
    return head(model, stream)
