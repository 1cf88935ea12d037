"""The same fraction of a group in every block, and the groups that a model allows."""

from __future__ import annotations

from corp_cli.config.prune import SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.models.blocks import Block, Sizes


def kept_size(dense: int, fraction: float, round_to: int) -> int:
    """Units to keep of `dense` when removing `fraction`: all of none, else the nearest multiple of `round_to`."""
    if fraction == 0:
        return dense
    size = round(dense * (1 - fraction) / round_to) * round_to
    return min(dense, max(size, min(round_to, dense)))


def uniform_sizes(block: Block, groups: frozenset[str], cfg: SparsityConfig) -> Sizes:
    """Sizes as asked, the same for every block; dense where the block does not allow it."""
    kept = {}
    for group, fraction in cfg.fractions().items():
        asked = fraction if group in groups and group not in block.refusals else 0.0
        kept[group] = kept_size(getattr(block.sizes, group), asked, 1 if group == "heads" else cfg.round_to)
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
