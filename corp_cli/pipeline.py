"""prune(cfg): prepare → calibrate → rank → sizes → keep → compensate → judge → export → report. Read this first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli.config.images import CalibrationConfig, EvaluationConfig
from corp_cli.config.outcome import names_in
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from corp_cli.export.formats import require_packages
from corp_cli.export.write import copied, export, export_formats, make_manifest
from corp_cli.files.cache.cache import Cache, cached_blocks, cached_curves, cached_losses, cached_statistics, opened
from corp_cli.files.checkpoint import carry_manifest
from corp_cli.files.output import PLAN, clear_results, require_room, size_in_bytes, write_whole
from corp_cli.measure.judge import Findings, judge
from corp_cli.measure.precision import products
from corp_cli.method.calibrate import calibrate, require_tokens
from corp_cli.method.compensate import Errors, compensate
from corp_cli.method.cut import only
from corp_cli.method.fit_one_shot import TRIAL_IMAGES, fit_every_block, left_by_refit, trial_depends
from corp_cli.method.keep import KeptUnits, keep
from corp_cli.method.optin import Losses, trajectory_losses, trajectory_scores
from corp_cli.method.rank import RankerArgs, Scores, rank
from corp_cli.method.sequential import compensate_sequentially
from corp_cli.method.statistics import Statistics
from corp_cli.method.stream import Rollout, rollout_of
from corp_cli.models.blocks import Sizes
from corp_cli.models.layer_scale import fold_layer_scale
from corp_cli.models.plain_block import put_plain_blocks
from corp_cli.models.streams import cannot_walk
from corp_cli.models.token_block import spare_tokens
from corp_cli.prepare.batches import calibration_batches, curve_batches, first_batch, tracked_batches
from corp_cli.prepare.images import some, warn_near_chance
from corp_cli.prepare.work import Given, Work, prepare
from corp_cli.report.page.page import write_page
from corp_cli.report.report import make_report, write_report
from corp_cli.report.schema import Report
from corp_cli.report.summary import brief, summary_html
from corp_cli.report.track import require_trackers, track
from corp_cli.runtime import ranks
from corp_cli.runtime.console import Stopwatch, collect_warnings
from corp_cli.runtime.memory import halving_batches
from corp_cli.sizes.curves import Curve, damage_curves, refitted, undone
from corp_cli.sizes.plan import MeasureCurves, SizePlan, choose_sizes
from corp_cli.sizes.plan_file import plan_text

STAGES = ("load", "calibrate", "rank", "plan", "compensate", "evaluate", "export")
Expect = Callable[[Work, PruneConfig], dict[str, float]]  # → seconds by stage


@dataclass(frozen=True)
class PruneResult:
    """The pruned model, in eval mode on the device it was pruned on, and what was measured of it.

    The model carries what `save_pruned` needs; prune_model gives it the mode and dtype of the model that it got.
    """

    model: nn.Module
    report: Report

    def __repr__(self) -> str:
        """What changed, in one line."""
        return f"<PruneResult of {brief(self.report)}>"

    def _repr_html_(self) -> str:
        """The table that `corp prune` prints, for a notebook."""
        return summary_html(self.report)


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def prune(
    cfg: PruneConfig,
    output_dir: str | PathLike[str] | None = None,
    cache: Cache | None = None,
    given: Given | None = None,
    expect: Expect | None = None,
) -> PruneResult:
    """Prune one model as `cfg` says; write pruned.safetensors, report.json, report.html and plan.yaml to `output_dir`.

    cache: where statistics, damage curves and compensated blocks are kept and found again, besides calibration.cache.
    given: a model and images that are at hand, in place of those that `cfg` names; see corp_cli.live.prune_model.
    expect: estimates what the stages will take, for the time left that a terminal sees.
    Of several processes (corp_cli.runtime.ranks) the first alone has a folder and a cache; all give the same model.
    Raises CorpError for anything that the user can put right.
    """
    folder = None if output_dir is None else Path(output_dir)
    watch, warnings = Stopwatch(STAGES), collect_warnings()
    with watch("load"):
        work = prepare_run(cfg, folder, given)
        cfg = replace(cfg, sparsity=work.sparsity)
        dense, blocks, images = work.dense.model, work.dense.blocks, work.images
        sets, how = (images.calibration, images.spares), (work.calibration.precision, cfg.compensation.weighs_logits)
        cache = ranks.once(opened, cache or Cache(), cfg.calibration.cache, work.dense, sets, work.groups, *how)
        watch.expected |= expect(work, cfg) if expect else {}
    exact = cfg.calibration.precision == "float32"
    with products(work.calibration.precision, work.dense.device, exact):
        with watch("calibrate"):
            rollout = rollout_of(dense, cfg.compensation) if work.refits else None
            statistics = statistics_of(work, cfg, cache, rollout) if work.measured else ()
        with watch("rank"):
            trajectory = trajectory_of(work, cfg, cache)
            args = RankerArgs.seeded(cfg.seed, cfg.compensation.ridge, trajectory)
            scores = rank(dense, blocks, statistics, work.groups, cfg.ranker, args, work.asked) if work.measured else ()
        with watch("plan"):
            curves = curves_of(work, cfg, statistics, scores, cache)
            plan = choose_sizes(work.target, cfg.sparsity.rounds, curves, scores)
        with watch("compensate"):
            if work.along:  # every block is measured and ranked anew
                pruned, kept, errors = compensate_along_the_stream(work, cfg, plan, cache, trajectory)
            else:
                kept = tuple(keep(*each) for each in zip(scores, blocks, plan.sizes, strict=True))
                pruned, errors = compensate(dense, blocks, statistics, kept, cfg.compensation)
                del statistics, curves  # refits need the room
                if work.refits:
                    pruned, errors = fit_at_once(work, cfg, kept, pruned, errors, rollout)
            uncompensated = only(dense, blocks, kept)
            for model in (uncompensated, pruned):
                fold_layer_scale(model)
                spare_tokens(model, plan.merge, plan.updated_tokens)
                put_plain_blocks(model)
    with watch("evaluate"):
        ahead = copied(pruned, work.dense) if work.copies_ahead else None
        models = {"dense": dense, "uncompensated": uncompensated, "pruned": pruned}
        found, probe = halving_batches(lambda c: examine(models, work, c), cfg.evaluation, "evaluation")
    with watch("export"), ranks.alone():
        written, files = ahead or copied(pruned, work.dense), None
        manifest = carry_manifest(pruned, make_manifest(work.dense, written, cfg))
        if folder:
            export(pruned, written.model, manifest, folder, probe)
            files = export_formats(pruned, manifest, images, cfg, folder)
    report = make_report(cfg, work, manifest, pruned, errors, found, plan, files, watch.seconds, warnings)
    if folder:
        write_whole(folder / PLAN, lambda file: file.write(plan_text(plan, blocks)))
        write_report(report, folder)
        write_page(report, folder)
        track(report, names_in(cfg.track), folder)
    return PruneResult(pruned, report)


def prepare_run(cfg: PruneConfig, folder: Path | None, given: Given | None = None) -> Work:
    """What the run works on. Raises CorpError for all that can be known before long work, room for files included.

    From here on `folder` holds no results of an earlier run.
    """
    if cfg.dry_run:
        raise CorpError(
            "dry_run=true is for the command corp prune; from Python, see corp_cli.commands.dry_run.foresee."
        )
    require_packages(cfg.export)
    require_trackers(names_in(cfg.track))
    work = prepare(cfg, given)
    if folder:
        require_room(folder, size_in_bytes(work.dense.model))
        clear_results(folder)
    return work


def statistics_of(work: Work, cfg: PruneConfig, cache: Cache, rollout: Rollout | None = None) -> Statistics:
    """Statistics of every block on the calibration images, from the cache or measured."""
    intake = work.images.calibrated
    found = cached_statistics(cache, work.dense, intake, lambda: measure_statistics(work, cfg, rollout))
    require_tokens(work.dense.blocks, found, intake.good, cfg.compensation)
    return found


def measure_statistics(work: Work, cfg: PruneConfig, rollout: Rollout | None) -> Statistics:
    """Statistics of every block on the calibration images."""
    dense, weighs = work.dense, cfg.compensation.weighs_logits

    def measure(c: CalibrationConfig) -> Statistics:
        batches = calibration_batches(work.images, dense, c, cfg.seed)
        return calibrate(dense.model, dense.blocks, batches, work.groups, work.keep, weighs, rollout)

    return halving_batches(measure, work.calibration, "calibration")


def trajectory_of(work: Work, cfg: PruneConfig, cache: Cache) -> tuple[Scores, ...]:
    """Scores of every block for the ranker optin, from the cache or by masking unit after unit; none where unasked."""
    dense, count, groups = work.dense, cfg.ranker.optin_images, work.masked(cfg.ranker)
    if not groups:
        return ()
    progress = cached_losses(cache, {"masked": sorted(groups), "images": [count, cfg.seed]})

    def measure(c: CalibrationConfig) -> tuple[Losses, ...]:
        batches = curve_batches(work.images, dense, count, c, cfg.seed)
        return trajectory_losses(dense.model, dense.blocks, groups, batches, c.batch, progress)

    losses = ranks.once(halving_batches, measure, work.calibration, "calibration")
    return trajectory_scores(losses, cfg.ranker.optin_lambda)


def curves_of(
    work: Work, cfg: PruneConfig, statistics: Statistics, scores: tuple[Scores, ...], cache: Cache
) -> MeasureCurves:
    """Damage curves as a budget asks for them: from the cache, or measured on some of the calibration images."""
    dense, count, settings = work.dense, cfg.sparsity.curve_images, cfg.compensation
    fits = settings.mlp == "gauss_newton" and "mlp" in work.groups and not cannot_walk(dense.model)
    trial = functools.cache(lambda: left_of(work, cfg, statistics, scores)) if fits else lambda: ()

    def curves(context: tuple[Sizes, ...], anchors: tuple[float, ...], wanted: list[tuple[int, str]]) -> list[Curve]:
        def measure() -> list[Curve]:
            batches = list(curve_batches(work.images, dense, count, work.calibration, cfg.seed))
            found = damage_curves(
                dense.model, dense.blocks, statistics, scores, context, anchors, wanted, batches, settings
            )
            return refitted(found, trial())

        parts = {
            "ranker": asdict(cfg.ranker),
            "compensation": {key: getattr(settings, key) for key in ("mlp", "qk", "vo", "ridge")},
            **({"refit": trial_depends(settings)} if fits else {}),
            "images": [count, cfg.seed],
            "context": [asdict(sizes) for sizes in context],
            "anchors": anchors,
            "wanted": wanted,
        }
        kept = cached_curves(cache, parts, measure)
        return undone(kept, len(dense.blocks)) if work.along else kept

    return curves


def left_of(work: Work, cfg: PruneConfig, statistics: Statistics, scores: tuple[Scores, ...]) -> tuple[float, ...]:
    """What the refit of every MLP leaves of its error, tried on some of the calibration images."""
    dense, how = work.dense, cfg.compensation

    def measure(c: CalibrationConfig) -> tuple[float, ...]:
        batches = calibration_batches(some(work.images, TRIAL_IMAGES, cfg.seed), dense, c, cfg.seed)
        return left_by_refit(dense.model, dense.blocks, statistics, scores, batches, how, cfg.seed, work.keep)

    return halving_batches(measure, work.calibration, "calibration")


def fit_at_once(
    work: Work,
    cfg: PruneConfig,
    kept: tuple[KeptUnits, ...],
    pruned: nn.Module,
    errors: Errors,
    rollout: Rollout | None,
) -> tuple[nn.Module, Errors]:
    """What was cut in all blocks, refitted by what the dense model is given and gives."""
    dense, how, weights = work.dense, cfg.compensation, rollout.weights() if rollout else None

    def fit(c: CalibrationConfig) -> tuple[nn.Module, Errors]:
        batches = calibration_batches(work.images, dense, c, cfg.seed)
        return fit_every_block(
            dense.model, pruned, dense.blocks, kept, errors, batches, how, cfg.seed, work.keep, weights
        )

    return halving_batches(fit, work.calibration, "calibration")


def compensate_along_the_stream(
    work: Work, cfg: PruneConfig, plan: SizePlan, cache: Cache, trajectory: tuple[Scores, ...]
) -> tuple[nn.Module, tuple[KeptUnits, ...], Errors]:
    """Block by block: every block is calibrated, ranked and compensated anew behind those before it."""
    dense = work.dense
    parts = {
        "ranker": asdict(cfg.ranker),
        "compensation": asdict(cfg.compensation),
        "seed": cfg.seed,
        "sizes": [asdict(sizes) for sizes in plan.sizes],
        "merge": plan.merge,
    }
    return halving_batches(
        lambda c: compensate_sequentially(
            dense.model,
            dense.blocks,
            plan.sizes,
            plan.merge,
            work.groups,
            calibration_batches(work.images, dense, c, cfg.seed),
            cfg.ranker,
            cfg.compensation,
            RankerArgs.seeded(cfg.seed, cfg.compensation.ridge, trajectory),
            cached_blocks(cache, parts),
            work.keep,
        ),
        work.calibration,
        "calibration",
    )


def examine(models: dict[str, nn.Module], work: Work, cfg: EvaluationConfig) -> tuple[Findings, Tensor]:
    """(what is found of the models on the evaluation images, the batch that they were timed on)."""
    dense, images = work.dense, work.images
    probe = first_batch(images.evaluation, cfg.batch_size, dense.spec, dense.device)
    batches = tracked_batches(images.evaluation, cfg, dense.spec, dense.device, images.evaluated)
    alone = ranks.leads() and work.calibration.offload == "none"  # weights on their way are no speed
    repeats = cfg.throughput_batches if alone else 0
    found = judge(models, batches, probe, repeats, cfg.precision, ranks.gathered)
    warn_near_chance(found.evaluations["dense"].top1, found.labelled_images, dense.spec.args["num_classes"])
    return found, probe
