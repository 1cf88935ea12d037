"""The statistics of a run: from the cache where they were measured before, else measured and kept there."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from corp_cli.config.prune import CompensationConfig, PruneConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.statistics import (
    Kept,
    cache_file,
    differing,
    images_sha256,
    make_key,
    read_statistics,
    write_statistics,
)
from corp_cli.files.checkpoint import weights_sha256
from corp_cli.files.output import write_cache
from corp_cli.method.calibrate import accumulation_device, calibrate
from corp_cli.method.statistics import Statistics
from corp_cli.models.blocks import Block
from corp_cli.prepare import Inputs, calibration_batches, warn_unread
from corp_cli.runtime import console
from corp_cli.runtime.memory import halving_batches


def measure_statistics(inputs: Inputs, cfg: PruneConfig, cache: Path | None = None) -> Statistics:
    """Statistics of every block on the calibration images; looked up in, or added to, `cache` if it is given.

    Raises CorpError where the images are too few for a repair without a ridge.
    """
    statistics = _measured(inputs, cfg) if cache is None else _cached(inputs, cfg, cache)
    require_tokens(inputs.blocks, statistics, inputs.calibrated.good, cfg.compensation)
    return statistics


def _measured(inputs: Inputs, cfg: PruneConfig) -> Statistics:
    return halving_batches(
        lambda c: calibrate(inputs.dense, inputs.blocks, calibration_batches(inputs, c), inputs.groups, inputs.device),
        cfg,
        "calibration",
    )


def statistics_key(inputs: Inputs) -> dict[str, str]:
    """What the statistics of these inputs depend on."""
    images = images_sha256(inputs.calibration, inputs.spares)
    return make_key(weights_sha256(inputs.dense), images, inputs.spec.data, inputs.groups)


def _cached(inputs: Inputs, cfg: PruneConfig, cache: Path) -> Statistics:
    key = statistics_key(inputs)
    path = cache_file(cache, key)
    foreign = False
    if path.exists():
        kept = read_statistics(path, accumulation_device(inputs.device))
        if kept is not None and kept.key == key:
            inputs.calibrated.restart()
            inputs.calibrated.take(kept.good, kept.bad)
            warn_unread(inputs.calibrated)
            console.err().print(f"corp: statistics of {kept.good} images read from {path}", style="dim", markup=False)
            return kept.statistics
        foreign = kept is None and path == cache
        why = "is not a whole file of corp's statistics"
        if kept is not None:
            why = f"was measured for other {differing(key, kept.key)}"
        then = "measuring without it" if foreign else "measuring anew and replacing it"
        console.warn(f"calibration.cache: {path} {why}; {then}.")
    statistics = _measured(inputs, cfg)
    if not foreign:  # a file that the user named and that corp did not write is left alone
        kept = Kept(key, statistics, inputs.calibrated.good, inputs.calibrated.bad)
        write_cache(partial(write_statistics, kept, path), cache)
    return statistics


def require_tokens(
    blocks: tuple[Block, ...], statistics: Statistics, images: int, compensation: CompensationConfig
) -> None:
    """Say how many images are needed where there are fewer tokens than channels: the covariance is then singular.

    A ridge copes, at a loss; raises CorpError where an affine repair is asked for without one.
    """
    for block, found in zip(blocks, statistics, strict=True):
        for group, moments in (("mlp", found.hidden), ("vo", found.head_output)):
            if moments is None or getattr(compensation, group) != "affine":
                continue
            channels = len(moments.mean)
            if moments.count >= channels:
                continue
            needed = math.ceil(channels * images / moments.count)
            said = (
                f"{images} calibration images give {moments.count} tokens for the {channels} channels of {group} in "
                f"{block.name}; at least {needed} images are needed, and many more are better"
            )
            if compensation.ridge_lambda == 0:
                raise CorpError(f"{said}. Give more images, or set compensation.ridge_lambda above 0.")
            console.warn(f"{said}. With so few a larger compensation.ridge_lambda helps, such as 1e-1.")
            return
