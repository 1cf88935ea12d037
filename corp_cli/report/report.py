"""report.json: everything a run found; and the parts of it that other reports share."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields
from pathlib import Path

from torch import Tensor, nn

from corp_cli.config.prune import PruneConfig
from corp_cli.config.shareable import shareable
from corp_cli.files.output import REPORT, write_json
from corp_cli.images.batches import Intake
from corp_cli.images.sources import ImageSet
from corp_cli.measure.judge import Findings
from corp_cli.measure.results import File
from corp_cli.method.compensate import Errors, GroupError
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import GROUPS, Block
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.spec import Manifest, ModelSpec
from corp_cli.prepare.work import Work
from corp_cli.report.parts import Bad, CalibrationImages, Data, Images, Model
from corp_cli.report.schema import (
    DamageCurve,
    Error,
    PrunedBlock,
    PrunedModel,
    PruneEvaluation,
    PruneThroughput,
    Refit,
    Removed,
    Report,
    Size,
    Sparsity,
)
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.sizes.curves import Curve
from corp_cli.sizes.plan import SizePlan

NAMED = 20  # bad images that a report names
CURVE_POINTS = 33  # of a damage curve: enough to draw it, and a report stays small


def data_of(spec: ModelSpec) -> Data:
    """How images are prepared."""
    return Data(**{field.name: spec.data[field.name] for field in fields(Data)})


def model_facts(loaded: LoadedModel) -> Model:
    """Origin and size of a model."""
    spec, manifest = loaded.spec, loaded.manifest
    return Model(
        source=loaded.source,
        timm_name=spec.name,
        args=spec.args,
        data=data_of(spec),
        sha256=loaded.sha256,
        dense_sha256=manifest.dense_sha256 if manifest else None,
        **vars(loaded.count()),
    )


def image_facts(images: ImageSet, intake: Intake) -> Images:
    """Where images came from, how many were used, which could not be read, and a hash over the list in order."""
    return Images(images.source, intake.good, Bad(len(intake.bad), intake.bad[:NAMED]), list_sha256(images))


def list_sha256(images: ImageSet) -> str:
    """SHA-256 over the names of files, relative to their folder, or the bytes of images in memory, in order."""
    digest = hashlib.sha256()
    for item in images.items:
        if isinstance(item, Path):
            name = item.relative_to(images.source) if item.is_relative_to(images.source) else item
            digest.update(f"{name.as_posix()}\n".encode("utf-8", "surrogateescape"))  # not all names are UTF-8
        elif isinstance(item, Tensor):
            digest.update(f"{tuple(item.shape)}".encode() + item.numpy().tobytes())
        else:
            digest.update(f"{item}\n".encode())
    return digest.hexdigest()


def size_of(manifest: Manifest) -> Size:
    """Parameters, MACs and FLOPs, dense and pruned."""
    assert manifest.counts is not None
    dense, pruned = manifest.counts.dense, manifest.counts.pruned
    gone = Removed(100 * (1 - pruned.parameters / dense.parameters), 100 * (1 - pruned.macs / dense.macs))
    return Size(dense, pruned, gone)


def achieved_sparsity(dense: tuple[Block, ...], pruned: tuple[Block, ...]) -> dict[str, float]:
    """group → fraction of all units of the model that were removed; dimensions of removed heads are not counted."""
    total = {g: sum(getattr(b.sizes, g) for b in dense) for g in GROUPS}
    left = {g: sum(getattr(b.sizes, g) for b in pruned) for g in GROUPS}
    return {g: 1 - left[g] / total[g] for g in GROUPS if total[g] > 0}


def block_rows(dense: tuple[Block, ...], pruned: tuple[Block, ...], errors: Errors) -> list[PrunedBlock]:
    """Sizes and relative reconstruction errors of every block."""
    rows = []
    for old, new, found in zip(dense, pruned, errors, strict=True):
        by_group = {group: Error(found[group].before, found[group].after) for group in GROUPS if group in found}
        mlp_fit = next(iter(refits(found, "mlp")), None)
        rows.append(PrunedBlock(old.name, old.sizes, new.sizes, by_group, mlp_fit, refits(found, "vo")))
    return rows


def refits(errors: dict[str, GroupError], group: str) -> list[Refit]:
    """What was refitted of a group of a block, if anything."""
    found = errors[group].fits if group in errors else ()
    return [Refit(fit.rounds, list(fit.ridges), Error(*fit.fitted), Error(*fit.held_out)) for fit in found]


def damage_curve(curve: Curve, blocks: tuple[Block, ...]) -> DamageCurve:
    """`curve` at no more than CURVE_POINTS sizes, dense among them."""
    dense = len(curve.damage) - 1
    sizes = sorted(range(dense, -1, -max(1, -(-dense // (CURVE_POINTS - 1)))))
    return DamageCurve(blocks[curve.block].name, curve.group, sizes, [float(curve.damage[size]) for size in sizes])


def make_report(
    cfg: PruneConfig,
    work: Work,
    manifest: Manifest,
    pruned: nn.Module,
    errors: Errors,
    found: Findings,
    plan: SizePlan,
    files: list[File] | None,
    seconds: dict[str, float],
    warnings: list[str],
) -> Report:
    """Everything that was found."""
    spec, judged, images = manifest.model, found.evaluations, work.images
    before, after, speed = work.dense.blocks, blocks_of(pruned), found.images_per_second
    report = Report(
        model=PrunedModel(cfg.model.name, spec.name, spec.args, data_of(spec), manifest.dense_sha256),
        config=asdict(cfg),
        seed=cfg.seed,
        environment=environment(work.dense.device),
        size=size_of(manifest),
        sparsity=Sparsity(
            cfg.sparsity.fractions(),
            achieved_sparsity(before, after),
            work.skipped,
            plan.updated_tokens,
            list(plan.merge) or None,
            plan.predicted_kl,
            plan.predicted_speedup,
            [damage_curve(curve, before) for curve in plan.curves],
        ),
        calibration=CalibrationImages(
            **vars(image_facts(images.calibration, images.calibrated)), precision=work.calibration.precision
        ),
        evaluation=PruneEvaluation(
            **vars(image_facts(images.evaluation, images.evaluated)),
            labelled_images=found.labelled_images,
            held_out=images.held_out,
            precision=cfg.evaluation.precision,
            dense=judged["dense"],
            uncompensated=judged["uncompensated"],
            pruned=judged["pruned"],
        ),
        throughput=PruneThroughput(found.batch_size, speed, speed["pruned"] / speed["dense"]) if speed else None,
        blocks=block_rows(before, after, errors),
        export=files,
        stage_seconds=seconds,
        peak_memory_mib=peak_memory_mib(work.dense.device),
        warnings=warnings,
    )
    return shareable(report, cfg)


def write_report(report: Report, folder: Path) -> None:
    """Write report.json into `folder`, whole or not at all. Raises CorpError if it cannot be written."""
    write_json(asdict(report), folder / REPORT)
