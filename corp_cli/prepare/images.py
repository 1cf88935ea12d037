"""Which images a run calibrates on and judges by, out of those that the config names, and their classes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from corp_cli.config.analyze import AnalyzeConfig
from corp_cli.config.export import RangesConfig
from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.images.batches import Intake, choose
from corp_cli.images.labels import Head, make_head, near_chance, read_class_map, with_label_file, with_labels
from corp_cli.images.sources import ImageSet, is_timm_name, joined, read_images
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.datasets import read_dataset
from corp_cli.models.preprocess import class_names, wordnet_classes
from corp_cli.runtime import console

HELD_OUT_IMAGES = 1024  # judged when no evaluation set is named


@dataclass
class Decoded:
    """Pixels of calibration images from a first pass over them, batch by batch, for the next; `whole` once all are."""

    batches: list[Tensor] = field(default_factory=list)
    whole: bool = False

    def restart(self) -> None:
        """Forget them."""
        self.batches, self.whole = [], False


@dataclass(frozen=True)
class Images:
    """The images that a run calibrates on and judges by, and what came of reading them."""

    calibration: ImageSet
    spares: ImageSet  # take the places of calibration images that cannot be read
    evaluation: ImageSet
    held_out: bool  # no evaluation image was calibrated on
    calibrated: Intake
    evaluated: Intake
    decoded: Decoded = field(default_factory=Decoded)


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


def some(images: Images, count: int, seed: int) -> Images:
    """The same run with `count` of its calibration images, all of which may be bad: calibration has judged them."""
    few, none = choose(images.calibration, count, seed)[0], images.calibration.subset([])
    return replace(images, calibration=few, spares=none, calibrated=Intake(few.source, "", len(few)), decoded=Decoded())


def intake_of(images: ImageSet, cfg: CalibrationConfig | EvaluationConfig | RangesConfig, group: str) -> Intake:
    """An empty record of reading `images`, with the limit of bad ones that `cfg` sets."""
    return Intake(f"{group}.path={images.source}", f"{group}.max_bad", int(cfg.max_bad * len(images)))


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


def warn_near_chance(top1: float | None, images: int, num_classes: int) -> None:
    """Say so where a dense model guesses: then the labels are probably not the model's classes."""
    if top1 is not None and (warning := near_chance(top1, images, num_classes)):
        console.warn(warning)
