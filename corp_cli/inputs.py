"""What a run works on: the dense model, the groups to prune, and the images. Checked before any long work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli import console
from corp_cli.config import PruneConfig
from corp_cli.data import ImageSet, batch_count, batches, choose, read_images, resolve_device, with_labels
from corp_cli.errors import CorpError
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Block
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import ModelSpec, load_dense
from corp_cli.models.preprocess import eval_transform, wordnet_classes
from corp_cli.rank import check_supported

HELD_OUT_IMAGES = 1024  # judged when no evaluation set is named


@dataclass(frozen=True)
class Inputs:
    """What a run works on: the dense model and its images."""

    device: torch.device
    dense: nn.Module
    spec: ModelSpec
    blocks: tuple[Block, ...]
    groups: frozenset[str]  # those to prune
    skipped: list[str]
    calibration: ImageSet
    evaluation: ImageSet
    held_out: bool  # no evaluation image was calibrated on


def load_inputs(cfg: PruneConfig) -> Inputs:
    """The dense model on its device, the groups to prune, and the images. Fails before any long work."""
    device = resolve_device(cfg.device)
    calibration = read_images(calibration_path(cfg), "calibration.path")
    dense, spec = load_dense(cfg.model)
    blocks = blocks_of(dense)
    groups, skipped = check_supported(blocks, cfg.sparsity)
    calibration, rest = choose(calibration, cfg.calibration.num_images, cfg.seed)
    if len(calibration) < cfg.calibration.num_images and cfg.calibration.path:
        console.warn(f"{calibration.source} holds {len(calibration)} images; calibrating on all of them.")
    evaluation, held_out = evaluation_images(cfg, calibration, rest)
    classes = int(getattr(dense, "num_classes", 0))
    evaluation = with_labels(evaluation, classes, wordnet_classes(classes))
    return Inputs(device, dense.to(device), spec, blocks, groups, skipped, calibration, evaluation, held_out)


def calibration_path(cfg: PruneConfig) -> Path:
    """The images asked for, or those that travel with a bundled model."""
    if cfg.calibration.path is not None:
        return Path(cfg.calibration.path)
    if cfg.model.name in BUNDLED:
        return BUNDLED[cfg.model.name].calibration
    raise CorpError(f"{cfg.model.name} needs images to calibrate on; set calibration.path to a folder of some.")


def evaluation_images(cfg: PruneConfig, calibration: ImageSet, rest: ImageSet) -> tuple[ImageSet, bool]:
    """(images, held out): those asked for, those of a bundled model, or those left over from calibration."""
    path = cfg.evaluation.path
    if path is None and cfg.calibration.path is None and cfg.model.name in BUNDLED:
        path = str(BUNDLED[cfg.model.name].evaluation)
    count = cfg.evaluation.num_images
    if path is not None:
        images = read_images(Path(path), "evaluation.path")
        images = choose(images, count, cfg.seed)[0] if count else images
        return images, not set(images.files()) & set(calibration.files())
    images, held_out = (rest, True) if len(rest) else (calibration, False)
    return choose(images, count or HELD_OUT_IMAGES, cfg.seed)[0], held_out


def calibration_batches(inputs: Inputs, cfg: PruneConfig) -> Iterator[Tensor]:
    """Preprocessed calibration images, with a progress bar."""
    size = cfg.calibration.batch_size
    transform, workers = eval_transform(inputs.spec.data), cfg.calibration.num_workers
    found = batches(inputs.calibration, transform, size, workers, inputs.device.type == "cuda")
    for images, _ in console.track(found, "calibrate", batch_count(inputs.calibration, size)):
        yield images.to(inputs.device, non_blocking=True)


def evaluation_batches(inputs: Inputs, cfg: PruneConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Preprocessed evaluation images and their labels, with a progress bar."""
    size = cfg.evaluation.batch_size
    transform, workers = eval_transform(inputs.spec.data), cfg.evaluation.num_workers
    found = batches(inputs.evaluation, transform, size, workers, inputs.device.type == "cuda")
    for images, labels in console.track(found, "evaluate", batch_count(inputs.evaluation, size)):
        yield images.to(inputs.device, non_blocking=True), labels.to(inputs.device)


def first_images(inputs: Inputs, count: int) -> Tensor:
    """The first `count` evaluation images, on the device."""
    few = inputs.evaluation.subset(list(range(min(count, len(inputs.evaluation)))))
    return next(batches(few, eval_transform(inputs.spec.data), count, 0))[0].to(inputs.device)
