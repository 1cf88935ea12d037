"""The two residual branches of a block, for every kind of block that corp can walk through. Does no maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.layers import LayerScale
from timm.models import beit, eva, swin_transformer, swin_transformer_v2, vision_transformer, vision_transformer_sam
from torch import Tensor, nn

from corp_cli.linalg.merging import size_bias

Function = Callable[..., Tensor]


def _same(x: Tensor) -> Tensor:
    return x


def _back(out: Tensor, stream: Tensor) -> Tensor:
    return out


@dataclass(frozen=True)
class Sublayer:
    """One residual branch: stream ← stream + post(merge(module(split(pre(stream))))), its last linear layer `output`.

    `split` puts the tokens of the stream into the order in which the module wants them, such as windows, and `merge`
    (out, stream) puts them back; both leave the channels alone. `gain` is what `post` multiplies the output with: a
    vector [D], 1.0, or None where it is not an elementwise scale.
    """

    pre: Function
    module: Function
    post: Function
    output: nn.Linear
    gain: Tensor | float | None
    split: Function = _same
    merge: Callable[[Tensor, Tensor], Tensor] = _back
    attends: bool = False  # plain attention, which can be told how many tokens each stands for

    def branch(self, stream: Tensor, sizes: Tensor | None = None) -> Tensor:
        """module(split(pre(stream))): what the branch adds, before `merge` and `post`.

        sizes [B, N, 1]: how many tokens each of the stream stands for, which counts for attention only.
        """
        given = self.split(self.pre(stream))
        if sizes is None or not self.attends:
            return self.module(given)
        return self.module(given, attn_mask=size_bias(sizes))

    def added(self, stream: Tensor, out: Tensor) -> Tensor:
        """The stream behind the branch, which gave `out`."""
        return stream + self.post(self.merge(out, stream))


Pair = tuple[Sublayer, Sublayer]


def _gain(post: nn.Module) -> Tensor | float | None:
    if isinstance(post, nn.Identity):
        return 1.0
    return post.gamma.detach() if isinstance(post, LayerScale) else None


def _plain(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + ls(f(norm(x))): timm's Block."""
    attn, mlp = block.attn, block.mlp
    return (
        Sublayer(block.norm1, partial(attn, **arguments), block.ls1, attn.proj, _gain(block.ls1), attends=True),
        Sublayer(block.norm2, mlp, block.ls2, mlp.fc2, _gain(block.ls2)),
    )


def _post_normed(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + norm(f(x)): timm's ResPostBlock and EvaBlockPostNorm."""
    attn, mlp = block.attn, block.mlp
    return (
        Sublayer(_same, partial(attn, **arguments), block.norm1, attn.proj, None),
        Sublayer(_same, mlp, block.norm2, mlp.fc2, None),
    )


def _scaled(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + γ f(norm(x)), γ a parameter of the block or none: EvaBlock and BEiT's Block."""
    (post1, gain1), (post2, gain2) = (_scale(gamma) for gamma in (block.gamma_1, block.gamma_2))
    attn, mlp = block.attn, block.mlp
    return (
        Sublayer(block.norm1, partial(attn, **arguments), post1, attn.proj, gain1),
        Sublayer(block.norm2, mlp, post2, mlp.fc2, gain2),
    )


def _scale(gamma: Tensor | None) -> tuple[Function, Tensor | float]:
    return (_same, 1.0) if gamma is None else (partial(torch.mul, gamma), gamma.detach())


def _sam(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + merge(ls(f(split(norm(x))))): the Block of Segment Anything; windows of size 0 are the whole grid."""
    attn, mlp = _plain(block, arguments)
    size = block.window_size
    if size == 0:
        return attn, mlp

    def merge(out: Tensor, stream: Tensor) -> Tensor:
        height, width = stream.shape[1:3]
        padded = -(-height // size) * size, -(-width // size) * size
        merged: Tensor = vision_transformer_sam.window_unpartition(out, size, (height, width), padded)
        return merged

    def split(x: Tensor) -> Tensor:
        windows: Tensor = vision_transformer_sam.window_partition(x, size)[0]
        return windows

    return Sublayer(attn.pre, attn.module, attn.post, attn.output, attn.gain, split, merge), mlp


def _swin(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + merge(f(split(norm(x)))), in windows that every second block shifts: Swin's block."""
    split, merge, windowed = _shifted_windows(block)
    attn, mlp = block.attn, block.mlp
    return (
        Sublayer(block.norm1, windowed, _same, attn.proj, 1.0, split, merge),
        Sublayer(block.norm2, mlp, _same, mlp.fc2, 1.0),
    )


def _swin_v2(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + norm(merge(f(split(x)))): the same of SwinV2."""
    split, merge, windowed = _shifted_windows(block)
    attn, mlp = block.attn, block.mlp
    return (
        Sublayer(_same, windowed, block.norm1, attn.proj, None, split, merge),
        Sublayer(_same, mlp, block.norm2, mlp.fc2, None),
    )


def _shifted_windows(block: Any) -> tuple[Function, Callable[[Tensor, Tensor], Tensor], Function]:
    """(split, merge, attention) of a Swin block, as its `_attn` does it."""
    (high, wide), shift = block.window_size, block.shift_size

    def shifted(x: Tensor) -> Tensor:
        """[B, H, W, C], rolled and filled up to whole windows."""
        x = torch.roll(x, [-s for s in shift], (1, 2)) if any(shift) else x
        return nn.functional.pad(x, (0, 0, 0, -x.shape[2] % wide, 0, -x.shape[1] % high))

    def split(x: Tensor) -> Tensor:
        windows = swin_transformer.window_partition(shifted(x), block.window_size)
        return windows.flatten(1, 2)

    def merge(out: Tensor, stream: Tensor) -> Tensor:
        height, width = stream.shape[1:3]
        rows, columns = -(-height // high), -(-width // wide)
        grid = out.unflatten(0, (-1, rows, columns)).unflatten(3, (high, wide)).transpose(2, 3)
        whole = grid.flatten(3, 4).flatten(1, 2)[:, :height, :width]
        return torch.roll(whole, list(shift), (1, 2)) if any(shift) else whole

    return split, merge, partial(block.attn, mask=block.attn_mask)


SUBLAYERS: dict[type[nn.Module], Callable[[Any, dict[str, Any]], Pair]] = {
    vision_transformer.Block: _plain,
    vision_transformer.ResPostBlock: _post_normed,
    eva.EvaBlock: _scaled,
    eva.EvaBlockPostNorm: _post_normed,
    beit.Block: _scaled,
    vision_transformer_sam.Block: _sam,
    swin_transformer.SwinTransformerBlock: _swin,
    swin_transformer_v2.SwinTransformerV2Block: _swin_v2,
}
