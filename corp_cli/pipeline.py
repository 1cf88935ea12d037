"""prune(cfg): calibrate → rank → compensate → export. Read this first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from corp_cli.calibrate import calibrate
from corp_cli.compensate import compensate
from corp_cli.config import CompensationConfig, PruneConfig
from corp_cli.console import Stopwatch
from corp_cli.evaluate import judge
from corp_cli.export import export, make_manifest
from corp_cli.inputs import calibration_batches, evaluation_batches, first_images, load_inputs
from corp_cli.models.adapter import blocks_of
from corp_cli.rank import make_plan, rank
from corp_cli.report import Report, make_report, write_report
from corp_cli.summary import show

UNCOMPENSATED = CompensationConfig(mlp="none", qk="none", vo="none")


@dataclass(frozen=True)
class PruneResult:
    """The pruned model, in eval mode on the device it was pruned on, and what was measured of it."""

    model: nn.Module
    report: Report


def prune(cfg: PruneConfig, output_dir: Path | None = None) -> PruneResult:
    """Prune one model as `cfg` says; write pruned.safetensors and report.json to `output_dir` if one is given.

    Raises CorpError for anything that the user can put right.
    """
    watch = Stopwatch()
    with watch("load"):
        inputs = load_inputs(cfg)
    dense, blocks, device = inputs.dense, inputs.blocks, inputs.device
    with watch("calibrate"):
        statistics = calibrate(dense, blocks, calibration_batches(inputs, cfg), inputs.groups, device)
    with watch("rank"):
        scores = rank(dense, blocks, statistics, inputs.groups, cfg.ranker, cfg.seed)
        plan = make_plan(scores, blocks, cfg.sparsity)
    with watch("compensate"):
        pruned, errors = compensate(dense, blocks, statistics, plan, cfg.compensation)
        dropped, _ = compensate(dense, blocks, statistics, plan, UNCOMPENSATED)
    with watch("evaluate"):
        models = {"dense": dense, "uncompensated": dropped, "pruned": pruned}
        probe = first_images(inputs, cfg.evaluation.batch_size)
        found = judge(models, evaluation_batches(inputs, cfg), probe, cfg.evaluation.throughput_batches)
    with watch("export"):
        manifest = make_manifest(dense, pruned, inputs.spec, cfg)
        if output_dir:
            export(pruned, manifest, output_dir, probe)
    report = make_report(cfg, inputs, manifest, blocks_of(pruned), errors, found, watch.seconds)
    if output_dir:
        write_report(report, output_dir)
    return PruneResult(pruned, report)


def run(cfg: PruneConfig, output_dir: Path) -> None:
    """`corp prune`: prune, write, and show what was found."""
    show(prune(cfg, output_dir).report, output_dir)
