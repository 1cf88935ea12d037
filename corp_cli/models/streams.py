"""The residual stream of a model, block by block: what the sequential stage walks along. Does no maths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.models.adapter import STAGED, block_names
from corp_cli.models.blocks import Block
from corp_cli.models.sublayers import SUBLAYERS, Pair

WALKED = VisionTransformer, Eva, Beit, VisionTransformerSAM, *STAGED


def cannot_walk(model: nn.Module) -> str | None:
    """Why the stream of a model cannot be followed from block to block, or None."""
    if not isinstance(model, WALKED):
        return f"corp does not know how {type(model).__name__} joins its blocks"
    blocks = [model.get_submodule(name) for name in block_names(model)]
    unknown = next((type(block).__name__ for block in blocks if type(block) not in SUBLAYERS), None)
    if unknown:
        return f"corp does not know how {unknown} joins its attention and MLP"
    if any(getattr(block, "dynamic_mask", False) for block in blocks):
        return f"{type(model).__name__} makes the masks of its windows anew for images of any size"
    return None


def keeps_grid(model: nn.Module) -> bool:
    """Whether the stream is [B, H, W, D], of which the blocks take windows, and not a sequence [B, N, D]."""
    return isinstance(model, (VisionTransformerSAM, *STAGED))


class _ReachedError(Exception):
    """Ends a forward pass once the first block has been reached."""


def tokens(model: nn.Module, images: Tensor) -> Tensor:
    """images [B, C, H, W] → the input of the first block: [B, N, D], or [B, H', W', D] where tokens keep a grid.

    Raises CorpError where they are of another size than the model is built for and their places would be wrong.
    """
    found: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0])
        raise _ReachedError

    handle = model.get_submodule(block_names(model)[0]).register_forward_pre_hook(stop, prepend=True)
    try:
        with suppress(_ReachedError):
            model(images)
    finally:
        handle.remove()
    if isinstance(model, Eva) and model.rope is not None:
        high, wide = model.patch_embed.grid_size
        if found[0].shape[1] != model.num_prefix_tokens + high * wide:
            raise CorpError(
                f"The model is built for {high} x {wide} patches, and the images are of another size; build it for "
                "theirs with '+model.args.img_size=[HEIGHT,WIDTH]'."
            )
    return found[0]


def head(model: nn.Module, stream: Tensor) -> Tensor:
    """The output of the last block → logits, or features where the model has no classifier."""
    timm_model: Any = model
    grid = isinstance(model, VisionTransformerSAM)
    normed = timm_model.neck(stream.permute(0, 3, 1, 2)) if grid else timm_model.norm(stream)
    logits: Tensor = timm_model.forward_head(normed)
    return logits


def enter(model: nn.Module, block: Block, stream: Tensor) -> Tensor:
    """What comes out of the block before → the input of `block`: between two stages tokens are merged."""
    stage, _, index = block.name.rpartition(".blocks.")
    if not isinstance(model, STAGED) or index != "0":
        return stream
    merged: Tensor = model.get_submodule(f"{stage}.downsample")(stream)
    return merged


def arguments(model: nn.Module, block: Block) -> dict[str, Any]:
    """What the model passes on to the attention of `block` besides the stream."""
    if isinstance(model, Eva):
        return {"rope": _rotation(model, block)}
    if isinstance(model, Beit):
        return {"shared_rel_pos_bias": None if model.rel_pos_bias is None else model.rel_pos_bias()}
    return {}


def _rotation(model: Any, block: Block) -> Tensor | None:
    if model.rope is None:
        return None
    cached = getattr(model.rope, "feat_shape", None) is not None
    rotation: Tensor = model.rope.get_embed(shape=None if cached else model.patch_embed.grid_size)
    return rotation[int(block.name.rpartition(".")[2])] if model.rope_mixed else rotation


def through(model: nn.Module, block: Block, stream: Tensor) -> Tensor:
    """What comes out of the block before → what comes out of `block`, with the modules that are in place now."""
    stream = enter(model, block, stream)
    out: Tensor = model.get_submodule(block.name)(stream, **arguments(model, block))
    return out


def sublayers(model: nn.Module, block: Block) -> Pair:
    """The attention and the MLP branch of a block, with the modules that are in place now."""
    module = model.get_submodule(block.name)
    return SUBLAYERS[type(module)](module, arguments(model, block))


@contextmanager
def input_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """While in force, the list holds the last input of `module`."""
    seen: list[Tensor] = []

    handle = module.register_forward_pre_hook(lambda _, args: seen.__setitem__(slice(None), [args[0]]))
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
    """Logits from what comes into the first of `blocks`, which must be the last ones of the model."""
    for block in blocks:
        stream = through(model, block, stream)
    return head(model, stream)
