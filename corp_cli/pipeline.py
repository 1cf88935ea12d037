"""prune(cfg): calibrate → rank → compensate → export. Read this first."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from torch import Tensor, nn

from corp_cli.compensate import Errors, compensate
from corp_cli.config import CompensationConfig, PruneConfig
from corp_cli.console import Stopwatch, collect_warnings
from corp_cli.evaluate import Findings, judge
from corp_cli.export import export, make_manifest
from corp_cli.inputs import (
    Inputs,
    calibration_batches,
    evaluation_batches,
    first_images,
    load_inputs,
    warn_near_chance,
)
from corp_cli.measure import measure_statistics
from corp_cli.memory import halving_batches, plain_memory_errors
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import Sizes
from corp_cli.output import require_room, size_in_bytes
from corp_cli.plan import check_sizes, choose_sizes, write_plan
from corp_cli.rank import Context, Plan, keep, rank
from corp_cli.report import Report, make_report, write_report
from corp_cli.sequential import compensate_sequentially
from corp_cli.statistics import Statistics
from corp_cli.summary import show

UNCOMPENSATED = CompensationConfig(mlp="none", qk="none", vo="none")


@dataclass(frozen=True)
class PruneResult:
    """The pruned model, in eval mode on the device it was pruned on, and what was measured of it."""

    model: nn.Module
    report: Report


def prune(cfg: PruneConfig, output_dir: str | PathLike[str] | None = None) -> PruneResult:
    """Prune one model as `cfg` says; write pruned.safetensors, report.json and plan.yaml to `output_dir` if given.

    Raises CorpError for anything that the user can put right.
    """
    folder = None if output_dir is None else Path(output_dir)
    watch, warnings = Stopwatch(), collect_warnings()
    with watch("load"):
        inputs = load_inputs(cfg)
        check_sizes(inputs, cfg)
        if folder:
            require_room(folder, size_in_bytes(inputs.dense))
    dense, blocks = inputs.dense, inputs.blocks
    with watch("calibrate"):
        statistics = measure_statistics(inputs, cfg)
    with watch("rank"):
        context = Context.seeded(cfg.seed, cfg.compensation.ridge_lambda)
        scores = rank(dense, blocks, statistics, inputs.groups, cfg.ranker, context)
    with watch("plan"):
        plan = choose_sizes(inputs, cfg, statistics, scores)
        kept = tuple(keep(*each) for each in zip(scores, blocks, plan.sizes, strict=True))
    with watch("compensate"):
        dropped, _ = compensate(dense, blocks, statistics, kept, UNCOMPENSATED)
        pruned, errors = repair(inputs, cfg, statistics, plan.sizes, kept)
    with watch("evaluate"):
        models = {"dense": dense, "uncompensated": dropped, "pruned": pruned}
        found, probe = halving_batches(lambda c: examine(models, inputs, c), cfg, "evaluation")
        warn_near_chance(found.evaluations["dense"].top1, found.labelled_images, inputs.spec.args["num_classes"])
    with watch("export"):
        manifest = make_manifest(dense, pruned, inputs.spec, cfg)
        if folder:
            export(pruned, manifest, folder, probe)
    report = make_report(
        cfg, inputs, manifest, blocks_of(pruned), errors, found, plan.predicted, watch.seconds, warnings
    )
    if folder:
        write_plan(plan, blocks, folder)
        write_report(report, folder)
    return PruneResult(pruned, report)


def repair(
    inputs: Inputs, cfg: PruneConfig, statistics: Statistics, sizes: tuple[Sizes, ...], kept: Plan
) -> tuple[nn.Module, Errors]:
    """One-shot from the statistics of the dense model, or block by block on the stream of the blocks before."""
    dense, blocks = inputs.dense, inputs.blocks
    if cfg.compensation.propagate == "none":
        return compensate(dense, blocks, statistics, kept, cfg.compensation)
    return halving_batches(
        lambda c: compensate_sequentially(
            dense, blocks, sizes, calibration_batches(inputs, c), inputs.groups, c, inputs.device
        ),
        cfg,
        "calibration",
    )


def examine(models: dict[str, nn.Module], inputs: Inputs, cfg: PruneConfig) -> tuple[Findings, Tensor]:
    """(what is found of the models on the evaluation images, the batch that they were timed on)."""
    probe = first_images(inputs, cfg.evaluation.batch_size)
    return judge(models, evaluation_batches(inputs, cfg), probe, cfg.evaluation.throughput_batches), probe


def run(cfg: PruneConfig, output_dir: Path) -> None:
    """`corp prune`: prune, write, and show what was found."""
    with plain_memory_errors():
        show(prune(cfg, output_dir).report, output_dir)
