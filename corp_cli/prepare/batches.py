"""The images of a run as its stages take them: preprocessed, batch by batch; a stage ends where too many are bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from corp_cli.config.export import RangesConfig
from corp_cli.config.images import BATCH, CalibrationConfig, EvaluationConfig
from corp_cli.errors import CorpError
from corp_cli.images.batches import Intake, Transform, batches, choose, own_batches, require_good
from corp_cli.images.sources import ImageSet
from corp_cli.method.memory import MOST_DECODED
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.preprocess import eval_transform
from corp_cli.models.spec import ModelSpec
from corp_cli.prepare.images import Decoded, Images
from corp_cli.runtime import console, ranks

Scale = Callable[[Tensor], Tensor]


def preparation(images: ImageSet, spec: ModelSpec) -> tuple[Transform | None, Scale]:
    """(what makes pixels of one of `images`, what makes of a batch of them, on its device, what the model takes).

    Of images that are prepared both are nothing to do. Raises CorpError as eval_transform does.
    """
    if images.prepared:
        return None, lambda pixels: pixels
    transform = eval_transform(spec.data)
    return transform.pixels, transform.scaled


def calibration_batches(images: Images, dense: LoadedModel, cfg: CalibrationConfig, seed: int) -> Iterator[Tensor]:
    """Preprocessed calibration images, with a progress bar; spares take the places of those that cannot be read.

    They are decoded once, where there is room to keep them: all processes decide alike, since each waits for the others
    to read. Each of several has its own part of the images.
    """
    total, again = len(ranks.part(len(images.calibration))), images.decoded.whole
    _, scaled = preparation(images.calibration, dense.spec)
    found = _kept(images.decoded, cfg) if again else _calibration_batches(images, dense, cfg, seed)
    for pixels in console.track(found, "calibrate", total, cfg.batch):
        yield scaled(pixels.to(dense.device, non_blocking=True))
    if not again and images.calibrated.key:  # without one, calibration has judged them
        require_good(images.calibrated)


def _kept(decoded: Decoded, cfg: CalibrationConfig) -> Iterator[Tensor]:
    for batch in decoded.batches:
        yield from batch.split(cfg.batch)


def _calibration_batches(images: Images, dense: LoadedModel, cfg: CalibrationConfig, seed: int) -> Iterator[Tensor]:
    images.calibrated.restart()
    images.decoded.restart()
    chosen, spares, wanted = images.calibration, images.spares, len(images.calibration)
    own, (transform, _) = ranks.part(wanted), preparation(chosen, dense.spec)
    fits = transform is not None and wanted * math.prod(dense.spec.data["input_size"]) <= MOST_DECODED
    while len(chosen):
        intake = images.calibrated
        # not pinned: that takes longer than copying them once, and what is kept could not be swapped out
        for pixels, _ in own_batches(chosen, own, transform, cfg.batch, cfg.num_workers, False, intake):
            if fits:
                images.decoded.batches.append(pixels)
            yield pixels
        chosen, spares = choose(spares, wanted - intake.good, seed)
        own = ranks.at_the_end(len(chosen))
    images.decoded.whole = fits


def curve_batches(
    images: Images, dense: LoadedModel, count: int, cfg: CalibrationConfig, seed: int
) -> Iterator[Tensor]:
    """The first `count` of the calibration images that can be read, preprocessed."""
    few, _ = choose(images.calibration, count, seed)
    intake = Intake(few.source, "", len(few))  # calibration has judged the bad ones
    transform, scaled = preparation(few, dense.spec)
    for pixels, _ in batches(few, transform, cfg.batch, cfg.num_workers, intake=intake):
        yield scaled(pixels.to(dense.device))
    if intake.good == 0:
        raise CorpError(f"None of the {len(few)} images for damage curves can be read; raise sparsity.curve_images.")


def range_batches(
    images: ImageSet, cfg: CalibrationConfig | RangesConfig, spec: ModelSpec, intake: Intake
) -> Iterator[Tensor]:
    """Preprocessed images on the host, for static int8; those that cannot be read are left out."""
    intake.restart()
    transform, scaled = preparation(images, spec)
    for pixels, _ in batches(images, transform, cfg.batch_size or BATCH, cfg.num_workers, intake=intake):
        yield scaled(pixels)
    require_good(intake)


def tracked_batches(
    images: ImageSet, cfg: EvaluationConfig, spec: ModelSpec, device: torch.device, intake: Intake
) -> Iterator[tuple[Tensor, Tensor]]:
    """Preprocessed images and labels on the device, with a progress bar; those that cannot be read are left out.

    Of several processes each has its own part of the images.
    """
    intake.restart()
    (transform, scaled), size, own = preparation(images, spec), cfg.batch_size, ranks.part(len(images))
    found = own_batches(images, own, transform, size, cfg.num_workers, device.type == "cuda", intake)
    for pixels, labels in console.track(found, "evaluate", len(own), size):
        yield scaled(pixels.to(device, non_blocking=True)), labels.to(device)
    require_good(intake)


def first_batch(images: ImageSet, count: int, spec: ModelSpec, device: torch.device) -> Tensor:
    """The first up to `count` images that can be read, on the device."""
    intake = Intake(images.source, "", len(images))
    transform, scaled = preparation(images, spec)
    for pixels, _ in batches(images, transform, count, 0, intake=intake):
        return scaled(pixels.to(device))
    raise CorpError(f"{images.source} holds no image that can be read, first {intake.bad[0]}; give other images.")
