"""What a run works on: the dense model, the groups to prune, and the images. Checked before any long work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from corp_cli.config.analyze import AnalyzeConfig
from corp_cli.config.export import RangesConfig
from corp_cli.config.gate import LimitsConfig
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.outcome import OF_CLASSES, names_in
from corp_cli.config.prune import PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.images.batches import Intake, Transform, batches, choose, own_batches, require_good, resolve_device
from corp_cli.images.labels import Head, make_head, near_chance, read_class_map, with_label_file, with_labels
from corp_cli.images.sources import ImageSet, is_timm_name, joined, read_images
from corp_cli.measure.precision import require_precision
from corp_cli.method.memory import Load, has_room_for_streams, load_of, place, settle
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.datasets import read_dataset
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.models.preprocess import class_names, describe, eval_transform, wordnet_classes
from corp_cli.models.spec import ModelSpec
from corp_cli.models.streams import cannot_walk, keeps_grid, tokens
from corp_cli.runtime import console, ranks
from corp_cli.runtime.scratch import Keep, keeper
from corp_cli.sizes.target import Target, make_target
from corp_cli.sizes.uniform import check_supported

HELD_OUT_IMAGES = 1024  # judged when no evaluation set is named


@dataclass(frozen=True)
class Images:
    """The images that a run calibrates on and judges by, and what came of reading them."""

    calibration: ImageSet
    spares: ImageSet  # take the places of calibration images that cannot be read
    evaluation: ImageSet
    held_out: bool  # no evaluation image was calibrated on
    calibrated: Intake
    evaluated: Intake


@dataclass(frozen=True)
class Given:
    """A model and images that a program holds, in place of those that the config names."""

    dense: LoadedModel  # in float32
    calibration: ImageSet | None  # None: those of calibration.path
    evaluation: ImageSet | None  # None: those of evaluation.path, or left over


@dataclass(frozen=True)
class Work:
    """What a run works on, and what it is to reach."""

    dense: LoadedModel
    groups: frozenset[str]  # those to prune
    skipped: list[str]  # what is left alone, and why
    images: Images
    target: Target
    sparsity: SparsityConfig  # as asked for; else as `settled`
    load: Load  # what its memory follows from
    calibration: CalibrationConfig  # as asked for, where that fits the device
    keep: Keep  # where the tokens of all images wait


def prepare(cfg: PruneConfig, given: Given | None = None) -> Work:
    """The dense model on its device, the images, and the target. Raises CorpError for all that can be known now."""
    device = resolve_device(cfg.device)
    require_precision(device, cfg.evaluation.precision)
    everything = (given and given.calibration) or calibration_images(cfg)
    dense = given.dense if given else dense_model(cfg.model, cfg.data, cfg.seed)
    if not everything.prepared:
        console.err().print(f"corp: images are seen at {describe(dense.spec.data)}", style="dim", markup=False)
    if ranks.count() > 1:
        console.err().print(f"corp: {ranks.count()} processes share the images", style="dim", markup=False)
    sparsity, target = settled(cfg, dense)
    cfg = replace(cfg, sparsity=sparsity)
    groups, skipped = check_supported(dense.blocks, sparsity)
    check_walk(dense, cfg)
    judged, head = (given and given.evaluation) or evaluation_images(cfg), head_of(dense.model)
    images = choose_images(everything, judged, cfg, head)
    load = load_of(dense, groups, len(images.calibration), sparsity)
    calibration = settle(load, dense, cfg.compensation, cfg.calibration, device)
    if calibration.offload == "blocks" and sparsity.latency is not None:
        raise CorpError(
            "sparsity.latency times the model on the device, and calibration.offload=blocks keeps it off that; use "
            "sparsity.macs or sparsity.params."
        )
    keep = keeper(calibration.scratch, device, has_room_for_streams(load, cfg.compensation, calibration, device))
    place(dense, calibration, device)
    require_labels(cfg.gate, images.evaluation.labelled)
    require_objective(names_in(cfg.objective), head, images.evaluation.labelled)
    target = target or make_target(dense, groups, sparsity)
    return Work(dense, groups, skipped, images, target, sparsity, load, calibration, keep)


def settled(cfg: PruneConfig, dense: LoadedModel) -> tuple[SparsityConfig, Target | None]:
    """What to remove: as `cfg` says; else 40% of all MACs, or what the paper does at that sparsity of its own.

    That is half of the MLP, and of queries and keys: with the paper's recipe, and for models that do not allow such a
    budget, or whose blocks cannot be walked through, on which damage is measured. With it comes the target, where that
    had to be made to find out.
    """
    asked = cfg.sparsity
    if asked.named():
        return asked, None
    found, target = replace(asked, joint=0.5), None
    if cfg.recipe != "paper" and not cannot_walk(dense.model):
        budget = replace(asked, macs=0.4)
        with suppress(CorpError):
            target = make_target(dense, check_supported(dense.blocks, budget)[0], budget)
            found = budget
    taken = "sparsity.joint=0.5" if target is None else "sparsity.macs=0.4"
    console.err().print(f"corp: nothing says how much to remove; taking {taken}", style="dim", markup=False)
    return found, target


def choose_images(everything: ImageSet, judged: ImageSet | None, cfg: PruneConfig, head: Head) -> Images:
    """Images to calibrate on out of `everything`, and those to judge by: out of `judged`, or what is left over."""
    if judged is None:  # images left over are judged on; what their folders mean depends on all of the folders
        everything = labelled(everything, cfg.evaluation, head)
    drawn, rest = draw_calibration(everything, cfg.calibration, cfg.seed)
    if judged is not None:
        evaluation = asked(judged, cfg.evaluation, head, cfg.seed)
        held_out = not evaluation.identities() & (drawn.calibration.identities() | drawn.spares.identities())
    else:
        evaluation, held_out = (rest, True) if len(rest) else (drawn.calibration, False)
        evaluation, _ = choose(evaluation, cfg.evaluation.num_images or HELD_OUT_IMAGES, cfg.seed)
    evaluated = intake_of(evaluation, cfg.evaluation, "evaluation")
    return replace(drawn, evaluation=evaluation, held_out=held_out, evaluated=evaluated)


def draw_calibration(everything: ImageSet, cfg: CalibrationConfig, seed: int) -> tuple[Images, ImageSet]:
    """(images to calibrate on, and nothing but those to judge by, those that are left over)."""
    calibration, rest = choose(everything, cfg.num_images, seed)
    if len(calibration) < cfg.num_images and cfg.path:
        console.warn(f"{calibration.source} holds {len(calibration)} images; calibrating on all of them.")
    calibrated = intake_of(calibration, cfg, "calibration")
    # More bad images than `allowed` end the run, so that it never needs more spares.
    spares, rest = choose(rest, min(calibrated.allowed, len(rest) // 2), seed)
    return Images(calibration, spares, calibration, False, calibrated, calibrated), rest


def require_labels(limits: LimitsConfig, labelled: bool) -> None:
    """Raise CorpError where a limit needs labels and there are none."""
    for key in ("max_top1_drop", "max_top5_drop"):
        if key in limits.limits() and not labelled:
            raise CorpError(
                f"gate.{key} needs labels and the evaluation images have none; judge it on images with labels "
                "(evaluation.path, evaluation.labels)."
            )


def require_objective(names: list[str], head: Head, labelled: bool) -> None:
    """Raise CorpError where a number that a sweeper is to go by will not be measured."""
    for name in names:
        if name in OF_CLASSES and not head.num_classes:
            raise CorpError(f"objective={name} needs a classifier and this model has none; take macs or latency.")
        if name == "top1" and not labelled:
            raise CorpError(
                "objective=top1 needs labels and the evaluation images have none; take agreement or kl, or judge it on "
                "images with labels (evaluation.path, evaluation.labels)."
            )


@torch.inference_mode()
def check_walk(loaded: LoadedModel, cfg: PruneConfig) -> None:
    """Warn where the repair cannot go block by block. Raises CorpError for what would have to."""
    dense = loaded.model
    why, budget = cannot_walk(dense), cfg.sparsity.budget()
    if why and budget:
        raise CorpError(
            f"sparsity.{budget} measures damage from block to block, and {why}; say how much of each group is to go, "
            "such as sparsity.mlp=0.5."
        )
    if budget == "latency" and keeps_grid(dense):
        raise CorpError(
            f"sparsity.latency times blocks on a sequence of tokens, and {type(dense).__name__} takes windows of a "
            "grid; use sparsity.macs or sparsity.params."
        )
    if why and cfg.ranker.measured() & cfg.sparsity.groups():
        raise CorpError(f"The ranker optin goes on from block to block, and {why}; choose another one.")
    sequential = cfg.compensation.propagate == "sequential"
    if why and sequential:
        console.warn(f"{why}, so all blocks are repaired at once, as with compensation.propagate=none.")
    elif sequential or budget:
        images = torch.zeros(1, *loaded.spec.data["input_size"]).to(next(dense.parameters()))
        tokens(dense, images)  # of a size that the model is built for?


def intake_of(images: ImageSet, cfg: CalibrationConfig | EvaluationConfig | RangesConfig, group: str) -> Intake:
    """An empty record of reading `images`, with the limit of bad ones that `cfg` sets."""
    return Intake(f"{group}.path={images.source}", f"{group}.max_bad", int(cfg.max_bad * len(images)))


# --- which images ---------------------------------------------------------------------------------------------


def find_images(
    cfg: CalibrationConfig | EvaluationConfig | RangesConfig, path: str | list[str], key: str, limit: int | None
) -> ImageSet:
    """The images at `path`, or at several, or those of the timm dataset of that name: at most `limit` of a stream."""
    if isinstance(path, list):
        return joined([find_images(cfg, one, key, limit) for one in path])
    if is_timm_name(path):
        return read_dataset(path, cfg.root, cfg.split, key, limit, cfg.image_key, cfg.label_key)
    return read_images(path, key)


def calibration_images(cfg: PruneConfig | AnalyzeConfig) -> ImageSet:
    """The images asked for, or those that travel with a bundled model, from which calibration chooses."""
    path = cfg.calibration.path
    if path is None and cfg.model.name in BUNDLED:
        path = str(BUNDLED[cfg.model.name].calibration)
    if path is None:
        raise CorpError(f"{cfg.model.name} needs images to calibrate on; set calibration.path to a folder of some.")
    return find_images(cfg.calibration, path, "calibration.path", cfg.calibration.num_images + HELD_OUT_IMAGES)


def evaluation_images(cfg: PruneConfig) -> ImageSet | None:
    """The images to judge on: those asked for, or a bundled model's own; None: left over from calibration."""
    path: str | list[str] | None = cfg.evaluation.path
    if path is None and cfg.calibration.path is None and cfg.model.name in BUNDLED:
        path = str(BUNDLED[cfg.model.name].evaluation)
    return None if path is None else find_images(cfg.evaluation, path, "evaluation.path", cfg.evaluation.num_images)


def asked_images(cfg: EvaluationConfig, path: str | list[str], head: Head, seed: int) -> ImageSet:
    """The images at `path`, labelled, as many of them as `cfg` asks for."""
    return asked(find_images(cfg, path, "evaluation.path", cfg.num_images), cfg, head, seed)


def asked(images: ImageSet, cfg: EvaluationConfig, head: Head, seed: int) -> ImageSet:
    """`images`, labelled, then as many of them as `cfg` asks for: labels may depend on all of them."""
    images = labelled(images, cfg, head)
    return choose(images, cfg.num_images, seed)[0] if cfg.num_images else images


# --- their classes --------------------------------------------------------------------------------------------


def head_of(model: nn.Module) -> Head:
    """What the outputs of `model` mean."""
    classes = int(getattr(model, "num_classes", 0) or 0)
    return make_head(classes, wordnet_classes(classes), class_names(model))


def labelled(images: ImageSet, cfg: EvaluationConfig, head: Head) -> ImageSet:
    """`images` with their classes, from evaluation.labels or else from their folders; warns of what does not fit."""
    for key in ("labels", "class_map"):
        if getattr(cfg, key) and head.num_classes == 0:
            raise CorpError(f"evaluation.{key} needs a classifier and the model has none; leave it out.")
    if head.num_classes == 0:
        console.warn("the model has no classifier (num_classes=0): its features are compared, by cosine, CKA and k-NN.")
    class_map = read_class_map(cfg.class_map, head) if cfg.class_map else None
    from_file = cfg.labels and with_label_file(images, cfg.labels, head, class_map)
    found = from_file or with_labels(images, head, class_map)
    for warning in found.warnings:
        console.warn(warning)
    return found.images


# --- batches --------------------------------------------------------------------------------------------------


def transform_for(images: ImageSet, spec: ModelSpec) -> Transform | None:
    """What prepares `images` for the model; None where they are prepared. Raises CorpError as eval_transform does."""
    return None if images.prepared else eval_transform(spec.data)


def calibration_batches(images: Images, dense: LoadedModel, cfg: CalibrationConfig, seed: int) -> Iterator[Tensor]:
    """Preprocessed calibration images, with a progress bar; spares take the places of those that cannot be read.

    Of several processes each has its own part of the images.
    """
    total = len(ranks.part(len(images.calibration)))
    yield from console.track(_calibration_batches(images, dense, cfg, seed), "calibrate", total, cfg.batch_size)
    require_good(images.calibrated)


def _calibration_batches(images: Images, dense: LoadedModel, cfg: CalibrationConfig, seed: int) -> Iterator[Tensor]:
    images.calibrated.restart()
    chosen, spares, wanted = images.calibration, images.spares, len(images.calibration)
    transform, device, own = transform_for(chosen, dense.spec), dense.device, ranks.part(wanted)
    while len(chosen):
        pin, intake = device.type == "cuda", images.calibrated
        for pixels, _ in own_batches(chosen, own, transform, cfg.batch_size, cfg.num_workers, pin, intake):
            yield pixels.to(device, non_blocking=True)
        chosen, spares = choose(spares, wanted - intake.good, seed)
        own = ranks.at_the_end(len(chosen))


def curve_batches(
    images: Images, dense: LoadedModel, count: int, cfg: CalibrationConfig, seed: int
) -> Iterator[Tensor]:
    """The first `count` of the calibration images that can be read, preprocessed."""
    few, _ = choose(images.calibration, count, seed)
    intake = Intake(few.source, "", len(few))  # calibration has judged the bad ones
    transform = transform_for(few, dense.spec)
    for pixels, _ in batches(few, transform, cfg.batch_size, cfg.num_workers, intake=intake):
        yield pixels.to(dense.device)
    if intake.good == 0:
        raise CorpError(f"None of the {len(few)} images for damage curves can be read; raise sparsity.curve_images.")


def range_batches(
    images: ImageSet, cfg: CalibrationConfig | RangesConfig, spec: ModelSpec, intake: Intake
) -> Iterator[Tensor]:
    """Preprocessed images on the host, for static int8; those that cannot be read are left out."""
    intake.restart()
    for pixels, _ in batches(images, transform_for(images, spec), cfg.batch_size, cfg.num_workers, intake=intake):
        yield pixels
    require_good(intake)


def tracked_batches(
    images: ImageSet, cfg: EvaluationConfig, spec: ModelSpec, device: torch.device, intake: Intake
) -> Iterator[tuple[Tensor, Tensor]]:
    """Preprocessed images and labels on the device, with a progress bar; those that cannot be read are left out.

    Of several processes each has its own part of the images.
    """
    intake.restart()
    transform, size, own = transform_for(images, spec), cfg.batch_size, ranks.part(len(images))
    found = own_batches(images, own, transform, size, cfg.num_workers, device.type == "cuda", intake)
    for pixels, labels in console.track(found, "evaluate", len(own), size):
        yield pixels.to(device, non_blocking=True), labels.to(device)
    require_good(intake)


def warn_near_chance(top1: float | None, images: int, num_classes: int) -> None:
    """Say so where a dense model guesses: then the labels are probably not the model's classes."""
    if top1 is not None and (warning := near_chance(top1, images, num_classes)):
        console.warn(warning)


def first_batch(images: ImageSet, count: int, spec: ModelSpec, device: torch.device) -> Tensor:
    """The first up to `count` images that can be read, on the device."""
    intake = Intake(images.source, "", len(images))
    for pixels, _ in batches(images, transform_for(images, spec), count, 0, intake=intake):
        return pixels.to(device)
    raise CorpError(f"{images.source} holds no image that can be read, first {intake.bad[0]}; give other images.")
