"""The two residual branches of a block, for every kind of block that corp can walk through. Does no maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from timm.layers import LayerScale
from timm.models import beit, eva, swin_transformer, swin_transformer_v2, vision_transformer, vision_transformer_sam
from torch import Tensor, nn

from corp_cli.linalg.merging import size_bias
from corp_cli.models.plain_block import PlainBlock

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


Functions = tuple[Function, Function]  # of attention, of MLP
Pair = tuple[Sublayer, Sublayer]


def _gain(post: Function) -> Tensor | float | None:
    if post is _same or isinstance(post, nn.Identity):
        return 1.0
    if isinstance(post, partial):  # of `_scale`
        return cast(Tensor, post.args[0]).detach()
    return post.gamma.detach() if isinstance(post, LayerScale) else None


def _pair(block: Any, attend: Function, pre: Functions, post: Functions, **attention: Any) -> Pair:
    attn_post, mlp_post = post
    return (
        Sublayer(pre[0], attend, attn_post, block.attn.proj, _gain(attn_post), **attention),
        Sublayer(pre[1], block.mlp, mlp_post, block.mlp.fc2, _gain(mlp_post)),
    )


def _norms(block: Any) -> Functions:
    return block.norm1, block.norm2


def _plain(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + ls(f(norm(x))): timm's Block."""
    return _pair(block, partial(block.attn, **arguments), _norms(block), (block.ls1, block.ls2), attends=True)


def _post_normed(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + norm(f(x)): timm's ResPostBlock and EvaBlockPostNorm."""
    return _pair(block, partial(block.attn, **arguments), (_same, _same), _norms(block))


def _scaled(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + γ f(norm(x)), γ a parameter of the block or none: EvaBlock and BEiT's Block."""
    post = _scale(block.gamma_1), _scale(block.gamma_2)
    return _pair(block, partial(block.attn, **arguments), _norms(block), post)


def _scale(gamma: Tensor | None) -> Function:
    return _same if gamma is None else partial(torch.mul, gamma)


def _sam(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + merge(ls(f(split(norm(x))))): the Block of Segment Anything; windows of size 0 are the whole grid."""
    size = block.window_size
    split, merge = _windows((size, size), (0, 0)) if size > 0 else (_same, _back)
    return _pair(block, block.attn, _norms(block), (block.ls1, block.ls2), split=split, merge=merge)


def _swin(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + merge(f(split(norm(x)))), in windows that every second block shifts: Swin's block."""
    return _pair(block, **_shifted(block), pre=_norms(block), post=(_same, _same))


def _swin_v2(block: Any, arguments: dict[str, Any]) -> Pair:
    """x + norm(merge(f(split(x)))): the same of SwinV2."""
    return _pair(block, **_shifted(block), pre=(_same, _same), post=_norms(block))


def _shifted(block: Any) -> dict[str, Function]:
    """The attention of a Swin block, as its `_attn` does it, and the windows that it takes as sequences."""
    split, merge = _windows(block.window_size, block.shift_size)
    attend = partial(block.attn, mask=block.attn_mask)
    return {"attend": attend, "split": lambda x: split(x).flatten(1, 2), "merge": merge}


def _windows(size: tuple[int, int], shift: tuple[int, int]) -> tuple[Function, Function]:
    """split: [B, H, W, C], rolled and filled up → windows [B n, high, wide, C]; merge: what came of them, as it was."""
    high, wide = size

    def split(x: Tensor) -> Tensor:
        x = torch.roll(x, [-s for s in shift], (1, 2)) if any(shift) else x
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[2] % wide, 0, -x.shape[1] % high))
        return swin_transformer.window_partition(padded, size)

    def merge(out: Tensor, stream: Tensor) -> Tensor:
        height, width = stream.shape[1:3]
        rows, columns = -(-height // high), -(-width // wide)
        grid = out.reshape(-1, rows, columns, high, wide, out.shape[-1]).transpose(2, 3)
        whole = grid.flatten(3, 4).flatten(1, 2)[:, :height, :width]
        return torch.roll(whole, list(shift), (1, 2)) if any(shift) else whole

    return split, merge


SUBLAYERS: dict[type[nn.Module], Callable[[Any, dict[str, Any]], Pair]] = {
    vision_transformer.Block: _plain,
    PlainBlock: _plain,
    vision_transformer.ResPostBlock: _post_normed,
    eva.EvaBlock: _scaled,
    eva.EvaBlockPostNorm: _post_normed,
    beit.Block: _scaled,
    vision_transformer_sam.Block: _sam,
    swin_transformer.SwinTransformerBlock: _swin,
    swin_transformer_v2.SwinTransformerV2Block: _swin_v2,
}
