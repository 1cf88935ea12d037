"""The same fraction of a group in every block, and the groups that a model allows."""

from __future__ import annotations

from typing import Any

from corp_cli.config.prune import SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.linalg.attention import ALIGNED
from corp_cli.models.blocks import Block, Sizes

TILE = 128  # channels that a GPU multiplies together, in large layers
VECTOR = 16  # float32 values that a CPU multiplies together
COARSE = 32  # of a layer, no more than this part is lost or kept by rounding


def step_of(round_to: Any, group: str, dense: int, device: str) -> int:
    """What kept sizes of a group of `dense` units are multiples of; heads go one by one.

    round_to: a number, or auto: channels of an MLP fill the vectors of a CPU and the tiles of a GPU, of which the last
    takes as long when it is not full; tiles are halved until one is at most 1 / `COARSE` of the layer.
    """
    if group == "heads":
        return 1
    if round_to != "auto":
        return int(round_to)
    if group != "mlp":
        return ALIGNED
    step = TILE if device == "cuda" else VECTOR
    while step > ALIGNED and step * COARSE > dense:
        step //= 2
    return step


def kept_size(dense: int, fraction: float, round_to: int) -> int:
    """Units to keep of `dense` when removing `fraction`: all of none, else the nearest multiple of `round_to`."""
    if fraction == 0:
        return dense
    size = round(dense * (1 - fraction) / round_to) * round_to
    return min(dense, max(size, min(round_to, dense)))


def uniform_sizes(block: Block, groups: frozenset[str], cfg: SparsityConfig, device: str = "cpu") -> Sizes:
    """Sizes as asked, the same for every block; dense where the block does not allow it. `device`: see `step_of`."""
    kept = {}
    for group, fraction in cfg.fractions().items():
        asked = fraction if group in groups and group not in block.refusals else 0.0
        dense = getattr(block.sizes, group)
        kept[group] = kept_size(dense, asked, step_of(cfg.round_to, group, dense, device))
    return Sizes(**kept)


def check_supported(blocks: tuple[Block, ...], cfg: SparsityConfig) -> tuple[frozenset[str], list[str]]:
    """The groups to prune, and what is left alone because the model does not allow it.

    Raises CorpError naming the layer and the reason, unless `sparsity.skip_unsupported` is set or a budget chooses.
    """
    groups, skipped = cfg.groups(), []
    for group in sorted(groups):
        refusals = [(b.attn if group != "mlp" else b.mlp, b.refusals[group]) for b in blocks if group in b.refusals]
        if not refusals:
            continue
        layer, reason = refusals[0]
        if not cfg.skip_unsupported and not cfg.chooses_sizes():
            raise CorpError(
                f"{layer} does not allow sparsity.{group}: {reason}. Set sparsity.{group}=0, or "
                "sparsity.skip_unsupported=true to leave such groups alone and prune the rest."
            )
        skipped.append(f"{group}: {len(refusals)} of {len(blocks)} blocks, first {layer}: {reason}")
    return groups, skipped
