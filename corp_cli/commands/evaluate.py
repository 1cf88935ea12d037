"""`corp evaluate`: a pruned checkpoint or a dense model on labelled images, or side by side on any."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from corp_cli.config.images import EvaluationConfig
from corp_cli.config.prune import EvaluateConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned, read_manifest, weights_sha256
from corp_cli.files.output import write_json, write_whole
from corp_cli.images.batches import resolve_device
from corp_cli.images.sources import ImageSet
from corp_cli.measure.judge import measure
from corp_cli.measure.macs import count_macs
from corp_cli.measure.metrics import ClassResult
from corp_cli.measure.timing import throughput
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import ModelSpec, load_dense, parameters, skeleton
from corp_cli.models.preprocess import describe, with_overrides
from corp_cli.models.resize import PrunedSizes, resize
from corp_cli.prepare import asked_images, first_batch, head_of, intake_of, tracked_batches, warn_near_chance
from corp_cli.report.report import image_facts, preprocessing
from corp_cli.runtime import console
from corp_cli.runtime.console import Stopwatch
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import halving_batches, plain_memory_errors

EVALUATION = "evaluation.json"
PER_CLASS = "per_class.csv"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Judged:
    """A model to evaluate, in eval mode on the CPU, and where it came from."""

    source: str  # the checkpoint's file, or the name of a dense model
    model: nn.Module
    spec: ModelSpec
    blocks: dict[str, PrunedSizes]  # those that differ from the dense model's
    dense_sha256: str | None = None  # of the dense weights that a pruned model was made from

    def facts(self) -> dict[str, Any]:
        """Origin and size, as JSON types."""
        shapes = skeleton(self.spec)
        resize(shapes, self.blocks)
        macs = count_macs(shapes, self.spec.data["input_size"])
        return {
            "source": self.source,
            "timm_name": self.spec.name,
            "args": self.spec.args,
            "data": preprocessing(self.spec),
            "sha256": weights_sha256(self.model),
            "dense_sha256": self.dense_sha256,
            "parameters": parameters(shapes),
            "macs": macs,
            "flops": 2 * macs,
        }


def load(cfg: EvaluateConfig) -> tuple[Judged, Judged | None]:
    """(the model to evaluate, its reference): a dense model alone has none. Raises CorpError if they do not fit."""
    dense = None
    if cfg.model.name:
        model, spec = load_dense(cfg.model, cfg.data)
        dense = Judged(cfg.model.checkpoint or cfg.model.name, model, spec, {})
    if cfg.checkpoint is None:
        assert dense is not None  # EvaluateConfig asks for one of them
        return dense, None
    manifest, model = read_manifest(cfg.checkpoint), load_pruned(cfg.checkpoint)
    spec = replace(manifest.model, data=with_overrides(manifest.model.data, cfg.data, model))
    pruned = Judged(cfg.checkpoint, model, spec, manifest.blocks, manifest.dense_sha256)
    if dense is not None:
        require_comparable(pruned, dense)
    return pruned, dense


def require_comparable(pruned: Judged, dense: Judged) -> None:
    """Raise CorpError where one of the models cannot take the images or classes of the other; warn of other weights."""
    for key, ours, theirs in (
        ("input_size", pruned.spec.data["input_size"], dense.spec.data["input_size"]),
        ("num_classes", pruned.spec.args["num_classes"], dense.spec.args["num_classes"]),
    ):
        if ours != theirs:
            raise CorpError(
                f"{pruned.source} has {key} {ours} and {dense.source} has {theirs}, so they cannot be compared; "
                f"{pruned.source} was made from {pruned.spec.name}."
            )
    if weights_sha256(dense.model) != pruned.dense_sha256:
        console.warn(f"{dense.source} has other weights than the dense model that {pruned.source} was made from.")


def images_to_judge(cfg: EvaluateConfig, judged: Judged) -> ImageSet:
    """The images asked for, or those of a bundled model, labelled where their folders name classes."""
    path = cfg.evaluation.path
    if path is None and cfg.model.name in BUNDLED:
        path = str(BUNDLED[cfg.model.name].evaluation)
    if path is None:
        raise CorpError("There are no images to evaluate on; set evaluation.path to a folder of some.")
    return asked_images(cfg.evaluation, path, head_of(judged.model), cfg.seed)


def evaluate_command(cfg: EvaluateConfig, output_dir: Path) -> dict[str, Any]:
    """Evaluate as `cfg` says; write evaluation.json and, with labels, per_class.csv → the content of the former."""
    watch, warnings = Stopwatch(), console.collect_warnings()
    device = resolve_device(cfg.device)
    with watch("load"):
        judged, reference = load(cfg)
        images = images_to_judge(cfg, judged)
        intake = intake_of(images, cfg.evaluation, "evaluation")
        if not images.labelled and reference is None:
            raise CorpError(
                f"There is nothing to measure: no folder of {images.source} names a class of the model, and there is "
                "no reference; give evaluation.path sub-folders named by class, or compare with model=… checkpoint=…"
            )
        facts = {"model": judged.facts(), "reference": reference and reference.facts()}
        models = {"model": judged.model.to(device)}
        if reference:
            models["reference"] = reference.model.to(device)
    with watch("evaluate"):
        metrics = halving_batches(
            lambda c: measure(
                models,
                tracked_batches(images, c, judged.spec, device, intake),
                "reference" if reference else None,
            ),
            cfg.evaluation,
            "evaluation",
        )
    if reference or cfg.checkpoint is None:  # a pruned model alone may well be no better than chance
        dense = metrics["reference" if reference else "model"]
        warn_near_chance(dense.result().top1, dense.labelled(), int(judged.spec.args["num_classes"]))
    with watch("throughput"):
        speed = halving_batches(lambda c: timed(models, images, judged.spec, c, device), cfg.evaluation, "evaluation")
    content = {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "config": asdict(cfg),
        "seed": cfg.seed,
        "environment": environment(device),
        "images": {**image_facts(images, intake), "labelled_images": metrics["model"].labelled()},
        "results": {name: asdict(metrics[name].result()) if name in metrics else None for name in facts},
        "throughput": speed,
        "stage_seconds": watch.seconds,
        "peak_memory_mib": peak_memory_mib(device),
        "warnings": warnings,
    }
    write_json(content, output_dir / EVALUATION)
    if rows := metrics["model"].per_class():
        write_per_class(rows, output_dir / PER_CLASS)
    return content


def timed(
    models: dict[str, nn.Module], images: ImageSet, spec: ModelSpec, cfg: EvaluationConfig, device: torch.device
) -> dict[str, Any] | None:
    """Images per second of the models on the first batch, or None where that is not asked for."""
    if cfg.throughput_batches == 0:
        return None
    probe = first_batch(images, cfg.batch_size, spec, device)
    return {
        "batch_size": len(probe),
        "images_per_second": throughput(models, probe, cfg.throughput_batches),
    }


def write_per_class(rows: list[ClassResult], path: Path) -> None:
    """One line per class: its index, its images, and the percentage right at the first and among five guesses."""

    def write(file: Any) -> None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("class", "images", "top1", "top5"))
        for row in rows:
            shares = (f"{100 * hits / row.images:.6g}" for hits in (row.top1, row.top5))
            writer.writerow((row.index, row.images, *shares))

    write_whole(path, write)


def table(content: dict[str, Any]) -> Table:
    """The results, a column for each model."""
    results = {name: result for name, result in content["results"].items() if result}
    found = Table(title=content["model"]["source"], title_justify="left")
    for column in ("", *results):
        found.add_column(column, justify="left" if column == "" else "right")
    rows = (
        ("top-1", "top1", "{:.1f}%"),
        ("top-5", "top5", "{:.1f}%"),
        ("loss", "loss", "{:.3f}"),
        ("calibration error", "calibration_error", "{:.1f}%"),
        ("agreement", "agreement", "{:.1f}%"),
        ("KL to reference", "kl", "{:.3f}"),
        ("k-NN top-1", "knn_top1", "{:.1f}%"),
        ("cosine to reference", "cosine", "{:.4f}"),
        ("CKA with reference", "cka", "{:.4f}"),
    )
    for label, key, form in rows:
        if results["model"][key] is None:
            continue
        cells = []
        for name, result in results.items():
            interval = result.get(f"{key}_interval")
            spread = f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
            itself = name == "reference" and key in ("agreement", "kl", "cosine", "cka")
            cells.append("" if itself else form.format(result[key]) + spread)
        found.add_row(label, *cells)
    if content["throughput"]:
        speeds = content["throughput"]["images_per_second"]
        found.add_row("images/s", *(f"{speeds[name]:.0f}" for name in results))
    return found


def run(cfg: EvaluateConfig, output_dir: Path) -> None:
    """`corp evaluate`: measure, write, and show what was found."""
    with plain_memory_errors():
        content = evaluate_command(cfg, output_dir)
    out, images = console.out(), content["images"]
    out.print(table(content))
    out.print(f"Images seen at {describe(content['model']['data'])}.", markup=False)
    scored = content["results"]["model"]["top1"] is not None
    intervals = " Intervals are Wilson's at 95%." if scored else ""
    labelled = f"{images['labelled_images']} of them labelled.{intervals}"
    out.print(f"{images['images']} images of {images['source']}, {labelled}", markup=False)
    files = f"{EVALUATION} and {PER_CLASS}" if scored else EVALUATION
    out.print(f"Wrote {files} to {output_dir}.", markup=False)
