"""report.json: everything a run found."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from corp_cli.config.prune import PruneConfig
from corp_cli.files.checkpoint import Manifest
from corp_cli.files.output import write_json
from corp_cli.images.batches import Intake
from corp_cli.images.sources import ImageSet
from corp_cli.measure.judge import Findings
from corp_cli.measure.macs import count_macs
from corp_cli.method.compensate import Errors
from corp_cli.models.adapter import blocks_of
from corp_cli.models.blocks import GROUPS, Block
from corp_cli.models.loading import DATA_KEYS, ModelSpec, parameters, skeleton
from corp_cli.models.resize import resize
from corp_cli.prepare import Work
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.sizes.plan import SizePlan

SCHEMA_VERSION = 1
REPORT = "report.json"


@dataclass(frozen=True)
class Report:
    """Everything a run found, in the order of report.json; docs/report.md explains every field."""

    schema_version: int
    model: dict[str, Any]
    config: dict[str, Any]
    seed: int
    environment: dict[str, Any]
    size: dict[str, Any]
    sparsity: dict[str, Any]
    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    throughput: dict[str, Any] | None
    blocks: list[dict[str, Any]]
    export: list[dict[str, Any]] | None
    stage_seconds: dict[str, float]
    peak_memory_mib: dict[str, float | None]
    warnings: list[str]


def size_counts(manifest: Manifest) -> dict[str, Any]:
    """Parameters, MACs and FLOPs (2 x MACs) of one image, dense and pruned, counted from shapes."""
    spec, counts = manifest.model, {}
    for name, blocks in (("dense", {}), ("pruned", manifest.blocks)):
        model = skeleton(spec)
        resize(model, blocks)
        macs = count_macs(model, spec.data["input_size"])
        counts[name] = {"parameters": float(parameters(model)), "macs": float(macs), "flops": float(2 * macs)}
    removed = {key: 100 * (1 - counts["pruned"][key] / counts["dense"][key]) for key in ("parameters", "macs")}
    return {
        **{name: {key: int(value) for key, value in count.items()} for name, count in counts.items()},
        "removed_percent": removed,
    }


def achieved_sparsity(dense: tuple[Block, ...], pruned: tuple[Block, ...]) -> dict[str, float]:
    """group → fraction of all units of the model that were removed; dimensions of removed heads are not counted."""
    total = {g: sum(getattr(b.sizes, g) for b in dense) for g in GROUPS}
    left = {g: sum(getattr(b.sizes, g) for b in pruned) for g in GROUPS}
    return {g: 1 - left[g] / total[g] for g in GROUPS if total[g] > 0}


def block_rows(dense: tuple[Block, ...], pruned: tuple[Block, ...], errors: Errors) -> list[dict[str, Any]]:
    """Sizes and relative reconstruction errors of every block."""
    return [
        {
            "name": old.name,
            "dense": asdict(old.sizes),
            "pruned": asdict(new.sizes),
            "reconstruction_error": {group: asdict(found[group]) for group in GROUPS if group in found},
        }
        for old, new, found in zip(dense, pruned, errors, strict=True)
    ]


def preprocessing(spec: ModelSpec) -> dict[str, Any]:
    """How images are prepared, in the order of the report."""
    return {key: spec.data[key] for key in DATA_KEYS}


def image_facts(images: ImageSet, intake: Intake) -> dict[str, Any]:
    """Where images came from, how many were used, which could not be read, and a hash over the list in order."""
    used = {"source": images.source, "images": intake.good, "bad": intake.facts()}
    return {**used, "list_sha256": list_sha256(images)}


def list_sha256(images: ImageSet) -> str:
    """SHA-256 over the names of files, relative to their folder, or the bytes of images in memory, in order."""
    digest = hashlib.sha256()
    for item in images.items:
        if isinstance(item, Path):
            name = item.relative_to(images.source) if item.is_relative_to(images.source) else item
            digest.update(f"{name.as_posix()}\n".encode())
        elif isinstance(item, Tensor):
            digest.update(f"{tuple(item.shape)}".encode() + item.numpy().tobytes())
        else:
            digest.update(f"{item}\n".encode())
    return digest.hexdigest()


def make_report(
    cfg: PruneConfig,
    work: Work,
    manifest: Manifest,
    pruned: nn.Module,
    errors: Errors,
    found: Findings,
    plan: SizePlan,
    files: list[dict[str, Any]] | None,
    seconds: dict[str, float],
    warnings: list[str],
) -> Report:
    """Everything that was found, as JSON types."""
    speed, images = found.images_per_second, work.images
    return Report(
        schema_version=SCHEMA_VERSION,
        model={
            "name": cfg.model.name,
            "timm_name": manifest.model.name,
            "args": manifest.model.args,
            "data": preprocessing(manifest.model),
            "dense_sha256": manifest.dense_sha256,
        },
        config=asdict(cfg),
        seed=cfg.seed,
        environment=environment(work.dense.device),
        size=size_counts(manifest),
        sparsity={
            "asked": cfg.sparsity.fractions(),
            "achieved": achieved_sparsity(work.dense.blocks, blocks_of(pruned)),
            "skipped": work.skipped,
            "last_block_tokens": plan.updated_tokens,
            "merged_tokens": list(plan.merge) or None,
            "predicted_kl": plan.predicted_kl,
            "predicted_speedup": plan.predicted_speedup,
        },
        calibration=image_facts(images.calibration, images.calibrated),
        evaluation={
            **image_facts(images.evaluation, images.evaluated),
            "labelled_images": found.labelled_images,
            "held_out": images.held_out,
            **{name: asdict(evaluation) for name, evaluation in found.evaluations.items()},
        },
        throughput=speed
        and {
            "batch_size": found.batch_size,
            "images_per_second": speed,
            "speedup": speed["pruned"] / speed["dense"],
        },
        blocks=block_rows(work.dense.blocks, blocks_of(pruned), errors),
        export=files,
        stage_seconds=seconds,
        peak_memory_mib=peak_memory_mib(work.dense.device),
        warnings=warnings,
    )


def write_report(report: Report, folder: Path) -> None:
    """Write report.json into `folder`, whole or not at all. Raises CorpError if it cannot be written."""
    write_json(asdict(report), folder / REPORT)
