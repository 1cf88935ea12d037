"""The model, its images and the target of a run; refuses, before any long work, all that can be known by then."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from corp_cli.config.gate import LimitsConfig
from corp_cli.config.images import CalibrationConfig
from corp_cli.config.outcome import OF_CLASSES, names_in
from corp_cli.config.prune import SEARCHES, PruneConfig, RankerConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.images.batches import resolve_device
from corp_cli.images.labels import Head
from corp_cli.images.sources import ImageSet
from corp_cli.measure.precision import require_precision, settled_precision
from corp_cli.method.memory import Load, has_room_for_streams, load_of, place, settle
from corp_cli.models.blocks import TOKENS, Sizes
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.models.preprocess import describe
from corp_cli.models.streams import cannot_walk, keeps_grid, tokens
from corp_cli.prepare.images import Images, calibration_images, choose_images, evaluation_images, head_of
from corp_cli.runtime import console, ranks
from corp_cli.runtime.scratch import Keep, keeper
from corp_cli.sizes.budget import Budget
from corp_cli.sizes.plan import SizePlan
from corp_cli.sizes.target import Target, make_target
from corp_cli.sizes.uniform import check_supported


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
    along: bool  # repaired block by block, each measured and ranked behind those before it
    refits: bool  # repaired at once, and then refitted block by block

    @property
    def asked(self) -> tuple[Sizes, ...] | None:
        """The sizes of all blocks; None under a budget."""
        return self.target.sizes if isinstance(self.target, SizePlan) else None

    @property
    def copies_ahead(self) -> bool:
        """Whether the pruned model is copied and hashed while it is judged: not by the CPU that judges it."""
        return self.dense.device.type != "cpu" and self.calibration.offload == "none" and ranks.leads()

    @property
    def measured(self) -> bool:
        """Whether anything is to be known of the dense model as a whole: not where sizes are given, and `along`."""
        return not (self.along and isinstance(self.target, SizePlan))

    def masked(self, ranker: RankerConfig) -> frozenset[str]:
        """What is masked unit by unit to score it: groups, and tokens where a search by scores may merge them."""
        target = self.target
        merges = isinstance(target, Budget) and target.search == "scores" and target.token_costs is not None
        return (ranker.measured() & self.groups) | ({TOKENS} if merges else set())


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
    load = load_of(dense, groups, len(images.calibration), sparsity, images.calibration.prepared, device)
    calibration = settle(load, dense, cfg.compensation, cfg.calibration, device)
    if calibration.offload == "blocks" and sparsity.latency is not None:
        raise CorpError(
            "sparsity.latency times the model on the device, and calibration.offload=blocks keeps it off that; use "
            "sparsity.macs or sparsity.params."
        )
    calibration = replace(calibration, precision=settled_precision(device, calibration.precision))
    keep = keeper(calibration.scratch, device, has_room_for_streams(load, cfg.compensation, calibration, device))
    if device.type != "cpu" and not given and not cfg.dry_run:
        dense.hash_ahead()  # what is hashed has yet to leave the host
    place(dense, calibration, device)
    require_labels(cfg.gate, images.evaluation.labelled)
    require_objective(names_in(cfg.objective), head, images.evaluation.labelled)
    target = target or make_target(dense, groups, sparsity)
    walks = cannot_walk(dense.model) is None
    along = walks and cfg.compensation.propagate == "sequential"
    refits = walks and not along and cfg.compensation.refits
    return Work(dense, groups, skipped, images, target, sparsity, load, calibration, keep, along, refits)


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
    by_scores = budget and cfg.sparsity.search == "scores"
    if by_scores and cfg.sparsity.merge_tokens and cfg.ranker.measured() != {*SEARCHES["scores"]}:
        raise CorpError(
            "sparsity.merge_tokens=true goes by measured damage, or by the scores of tokens that the ranker optin has; "
            "give recipe=optin, or leave out sparsity.search=scores."
        )
    sequential = cfg.compensation.propagate == "sequential"
    if why and sequential:
        console.warn(f"{why}, so all blocks are repaired at once, as with compensation.propagate=none.")
    elif sequential or budget:
        images = torch.zeros(1, *loaded.spec.data["input_size"]).to(next(dense.parameters()))
        tokens(dense, images)  # of a size that the model is built for?
