"""prune(cfg): calibrate → rank → compensate → export. Read this first."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from corp_cli.config.prune import CompensationConfig, PruneConfig
from corp_cli.errors import CorpError
from corp_cli.export.formats import require_packages
from corp_cli.export.write import export, export_formats, make_manifest
from corp_cli.files.cache.blocks import has_room, make_progress
from corp_cli.files.cache.measured import measure_statistics
from corp_cli.files.output import require_room, size_in_bytes
from corp_cli.images.sources import expand
from corp_cli.measure.judge import Findings, judge
from corp_cli.method.compensate import Errors, compensate
from corp_cli.method.rank import Context, Plan, keep, rank
from corp_cli.method.sequential import compensate_sequentially
from corp_cli.method.statistics import Statistics
from corp_cli.models.adapter import blocks_of
from corp_cli.models.streams import cannot_walk
from corp_cli.models.token_block import spare_tokens
from corp_cli.prepare import (
    Inputs,
    calibration_batches,
    evaluation_batches,
    first_images,
    load_inputs,
    warn_near_chance,
)
from corp_cli.report.gate import require_labels
from corp_cli.report.report import make_report, write_report
from corp_cli.report.schema import Report
from corp_cli.runtime.console import Stopwatch, collect_warnings
from corp_cli.runtime.memory import halving_batches
from corp_cli.sizes.budget import Budget
from corp_cli.sizes.plan import SizePlan, choose_sizes, make_target, write_plan

UNCOMPENSATED = CompensationConfig(mlp="none", qk="none", vo="none")


@dataclass(frozen=True)
class PruneResult:
    """The pruned model, in eval mode on the device it was pruned on, and what was measured of it."""

    model: nn.Module = field(repr=False)
    report: Report


@torch.inference_mode(False)  # the parameters are ordinary ones, whatever mode the caller is in
def prune(
    cfg: PruneConfig,
    output_dir: str | PathLike[str] | None = None,
    cache: Path | None = None,
    state: Path | None = None,
) -> PruneResult:
    """Prune one model as `cfg` says; write pruned.safetensors, report.json and plan.yaml to `output_dir` if given.

    cache: a folder where statistics and damage curves are kept for further runs, unless calibration.cache says.
    state: a folder where all that is done is kept, and found by the same run when it is begun again.
    Raises CorpError for anything that the user can put right.
    """
    folder = None if output_dir is None else Path(output_dir)
    watch, warnings = Stopwatch(), collect_warnings()
    with watch("load"):
        inputs, target = prepare(cfg, folder)
        state = state if state and has_room(state, inputs.blocks) else None
        cache = expand(cfg.calibration.cache) if cfg.calibration.cache else cache or state
    dense, blocks = inputs.dense, inputs.blocks
    with watch("calibrate"):
        statistics = measure_statistics(inputs, cfg, cache)
    with watch("rank"):
        context = Context.seeded(cfg.seed, cfg.compensation.ridge_lambda)
        scores = rank(dense, blocks, statistics, inputs.groups, cfg.ranker, context)
    with watch("plan"):
        plan = choose_sizes(target, inputs, cfg, statistics, scores, cache)
        kept = tuple(keep(*each) for each in zip(scores, blocks, plan.sizes, strict=True))
    with watch("compensate"):
        dropped, _ = compensate(dense, blocks, statistics, kept, UNCOMPENSATED)
        spare_tokens(dropped, plan.merge, plan.tokens)
        pruned, errors = repair(inputs, cfg, statistics, plan, kept, state)
    with watch("evaluate"):
        models = {"dense": dense, "uncompensated": dropped, "pruned": pruned}
        found, probe = halving_batches(lambda c: examine(models, inputs, c), cfg, "evaluation")
    with watch("export"):
        manifest, files = make_manifest(dense, pruned, inputs.spec, cfg), None
        if folder:
            export(pruned, manifest, folder, probe)
            files = export_formats(pruned, manifest, inputs, cfg, folder)
    report = make_report(cfg, inputs, manifest, blocks_of(pruned), errors, found, plan, files, watch.seconds, warnings)
    if folder:
        write_plan(plan, blocks, folder)
        write_report(report, folder)
    return PruneResult(pruned, report)


def prepare(cfg: PruneConfig, folder: Path | None) -> tuple[Inputs, SizePlan | Budget]:
    """What the run works on, and what it is to reach. Raises CorpError for all that can be known before long work."""
    if cfg.dry_run:
        raise CorpError(
            "dry_run=true is for the command corp prune; from Python, see corp_cli.commands.dry_run.foresee."
        )
    require_packages(cfg.export)
    inputs = load_inputs(cfg)
    require_labels(cfg.gate, inputs.evaluation.labelled)
    target = make_target(inputs, cfg)
    if folder:
        require_room(folder, size_in_bytes(inputs.dense))
    return inputs, target


def repair(
    inputs: Inputs, cfg: PruneConfig, statistics: Statistics, plan: SizePlan, kept: Plan, state: Path | None
) -> tuple[nn.Module, Errors]:
    """One-shot from the statistics of the dense model, or block by block on the stream of the blocks before."""
    dense, blocks = inputs.dense, inputs.blocks
    if cfg.compensation.propagate == "none" or cannot_walk(dense):
        pruned, errors = compensate(dense, blocks, statistics, kept, cfg.compensation)
    else:
        progress = make_progress(state, inputs, cfg, plan)
        pruned, errors = halving_batches(
            lambda c: compensate_sequentially(
                dense, blocks, plan, calibration_batches(inputs, c), inputs.groups, c, inputs.device, progress
            ),
            cfg,
            "calibration",
        )
    spare_tokens(pruned, plan.merge, plan.tokens)
    return pruned, errors


def examine(models: dict[str, nn.Module], inputs: Inputs, cfg: PruneConfig) -> tuple[Findings, Tensor]:
    """(what is found of the models on the evaluation images, the batch that they were timed on)."""
    probe = first_images(inputs, cfg.evaluation.batch_size)
    found = judge(models, evaluation_batches(inputs, cfg), probe, cfg.evaluation.throughput_batches)
    warn_near_chance(found.evaluations["dense"].top1, found.labelled_images, inputs.spec.args["num_classes"])
    return found, probe
