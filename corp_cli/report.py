"""report.json: everything a run found."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corp_cli.checkpoint import Manifest
from corp_cli.compensate import Errors
from corp_cli.config import PruneConfig
from corp_cli.environment import environment, peak_memory_mib
from corp_cli.errors import CorpError
from corp_cli.evaluate import Findings
from corp_cli.flops import count_macs
from corp_cli.inputs import Inputs
from corp_cli.models.blocks import GROUPS, Block
from corp_cli.models.loading import parameters, skeleton
from corp_cli.models.resize import resize

SCHEMA_VERSION = 1
REPORT = "report.json"


@dataclass(frozen=True)
class Report:
    """Everything a run found, in the order of report.json. Times in seconds, memory in MiB, accuracy in percent."""

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
    stage_seconds: dict[str, float]
    peak_memory_mib: dict[str, float]


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
            "reconstruction_error": {group: asdict(error) for group, error in found.items()},
        }
        for old, new, found in zip(dense, pruned, errors, strict=True)
    ]


def rounded(value: Any) -> Any:
    """`value` with every float at six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def make_report(
    cfg: PruneConfig,
    inputs: Inputs,
    manifest: Manifest,
    pruned: tuple[Block, ...],
    errors: Errors,
    found: Findings,
    seconds: dict[str, float],
) -> Report:
    """Everything that was found, as JSON types."""
    speed = found.images_per_second
    return Report(
        schema_version=SCHEMA_VERSION,
        model={
            "name": cfg.model.name,
            "timm_name": manifest.model.name,
            "args": manifest.model.args,
            "data": manifest.model.data,
            "dense_sha256": manifest.dense_sha256,
        },
        config=asdict(cfg),
        seed=cfg.seed,
        environment=environment(inputs.device),
        size=size_counts(manifest),
        sparsity={
            "asked": cfg.sparsity.fractions(),
            "achieved": achieved_sparsity(inputs.blocks, pruned),
            "skipped": inputs.skipped,
        },
        calibration={"source": inputs.calibration.source, "images": len(inputs.calibration)},
        evaluation={
            "source": inputs.evaluation.source,
            "images": len(inputs.evaluation),
            "labelled": inputs.evaluation.labels is not None,
            "held_out": inputs.held_out,
            **{name: asdict(evaluation) for name, evaluation in found.evaluations.items()},
        },
        throughput=speed
        and {
            "batch_size": found.batch_size,
            "images_per_second": speed,
            "speedup": speed["pruned"] / speed["dense"],
        },
        blocks=block_rows(inputs.blocks, pruned, errors),
        stage_seconds=seconds,
        peak_memory_mib=peak_memory_mib(inputs.device),
    )


def write_report(report: Report, folder: Path) -> None:
    """Write report.json into `folder`; it appears only when whole. Raises CorpError if it cannot be written."""
    path = folder / REPORT
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(rounded(asdict(report)), indent=2) + "\n")
        os.replace(partial, path)
    except OSError as error:
        raise CorpError(f"{path} cannot be written ({error}); check space and permissions.") from error
    finally:
        partial.unlink(missing_ok=True)
