"""A model cut and repaired as `corp prune` does it, without files: along the stream or in one shot."""

from __future__ import annotations

from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, RankerConfig, SparsityConfig
from corp_cli.method.calibrate import calibrate
from corp_cli.method.compensate import Errors, compensate
from corp_cli.method.fit_one_shot import fit_every_block
from corp_cli.method.keep import keep as keep_units
from corp_cli.method.rank import RankerArgs, rank
from corp_cli.method.sequential import compensate_sequentially
from corp_cli.models.adapter import blocks_of
from corp_cli.runtime.scratch import Keep, on_host
from corp_cli.sizes.uniform import check_supported, uniform_sizes


def repaired(
    model: nn.Module,
    x: Tensor,
    batch: int,
    sparsity: SparsityConfig,
    cfg: CompensationConfig,
    ranker: RankerConfig | None = None,
    keep: Keep = on_host,
    weights: Tensor | None = None,
) -> tuple[nn.Module, Errors]:
    """`model` cut to uniform sizes and repaired on the images x, `batch` at a time, with the errors of every block."""
    blocks, ranker, args = blocks_of(model), ranker or RankerConfig(), RankerArgs.seeded(0, cfg.ridge)
    groups, _ = check_supported(blocks, sparsity)
    sizes = tuple(uniform_sizes(block, groups, sparsity) for block in blocks)
    images = x.split(batch)
    if cfg.propagate == "sequential":
        pruned, _, errors = compensate_sequentially(
            model, blocks, sizes, (), groups, images, ranker, cfg, args, None, keep
        )
        return pruned, errors
    statistics = calibrate(model, blocks, images, groups, keep)
    scores = rank(model, blocks, statistics, groups, ranker, args, None)
    kept = tuple(keep_units(*each) for each in zip(scores, blocks, sizes, strict=True))
    pruned, errors = compensate(model, blocks, statistics, kept, cfg)
    if not cfg.refits:
        return pruned, errors
    return fit_every_block(model, pruned, blocks, kept, errors, images, cfg, 0, keep, weights)
