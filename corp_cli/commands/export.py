"""`corp export`: a pruned checkpoint or a dense model as a file that needs no corp, compared with the PyTorch model."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn

from corp_cli.commands.evaluate import Judged, load
from corp_cli.config.images import EvaluationConfig
from corp_cli.config.prune import EvaluateConfig, ExportConfig
from corp_cli.export.formats import ONNX_PACKAGES, Source, place, require_packages, runs_of, scratch, write_files
from corp_cli.export.parity import compare, random_images
from corp_cli.files.checkpoint import read_manifest
from corp_cli.files.output import require_room, size_in_bytes, write_json
from corp_cli.images.sources import ImageSet
from corp_cli.measure.timing import throughput
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import ModelSpec
from corp_cli.prepare import asked_images, first_batch, head_of, intake_of, tracked_batches
from corp_cli.report.report import image_facts
from corp_cli.runtime import console
from corp_cli.runtime.console import Stopwatch
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import halving_batches, plain_memory_errors

EXPORT = "export.json"
SCHEMA_VERSION = 1
CPU = torch.device("cpu")


def load_source(cfg: ExportConfig) -> tuple[Judged, Source]:
    """(the model to export with its origin, the same for the writers). Raises CorpError as `corp evaluate` does."""
    judged, _ = load(EvaluateConfig(cfg.checkpoint, cfg.model, cfg.evaluation, cfg.data, cfg.seed))
    manifest = read_manifest(cfg.checkpoint) if cfg.checkpoint else None
    return judged, Source(
        copy.deepcopy(judged.model).float(), judged.spec, manifest and replace(manifest, model=judged.spec)
    )


def images_of(cfg: ExportConfig, source: Source) -> ImageSet:
    """The images asked for, or those of a bundled model or of one pruned from it; else noise."""
    path = cfg.evaluation.path or bundled_images(source.spec)
    if path is None:
        return random_images(source.spec.data["input_size"], cfg.seed)
    return asked_images(cfg.evaluation, path, head_of(source.model), cfg.seed)


def bundled_images(spec: ModelSpec) -> str | None:
    """The evaluation images of the bundled model with this architecture and preprocessing."""
    found = (model for model in BUNDLED.values() if model.timm_name == spec.name and model.data == spec.data)
    return next((str(model.evaluation) for model in found), None)


def export_command(cfg: ExportConfig, output_dir: Path) -> dict[str, Any]:
    """Export as `cfg` says; write the file and export.json → the content of the latter."""
    watch, warnings = Stopwatch(), console.collect_warnings()
    options = cfg.options()
    require_packages(options)
    with watch("load"):
        judged, source = load_source(cfg)
        require_room(output_dir, 3 * size_in_bytes(source.model))  # the file, and copies that it is compared with
        images = images_of(cfg, source)
        intake = intake_of(images, cfg.evaluation, "evaluation")
    with scratch(output_dir) as folder:
        with watch("export"):
            files = write_files(source, options, folder)
        runs = runs_of(files)
        with watch("compare"):
            itself, parity = halving_batches(
                lambda c: compare(source.model, runs, tracked_batches(images, c, source.spec, CPU, intake)),
                cfg.evaluation,
                "evaluation",
            )
        with watch("throughput"):
            speed = halving_batches(lambda c: timed(source, runs, images, c), cfg.evaluation, "evaluation")
        facts = place(files, parity, output_dir)
    content = {
        "schema_version": SCHEMA_VERSION,
        "model": judged.facts(),
        "config": asdict(cfg),
        "seed": cfg.seed,
        "environment": surroundings(cfg.format),
        "images": {**image_facts(images, intake), "labelled_images": itself.labelled()},
        "pytorch": asdict(itself.result()),
        "files": facts,
        "throughput": speed,
        "stage_seconds": watch.seconds,
        "peak_memory_mib": peak_memory_mib(CPU),
        "warnings": warnings,
    }
    write_json(content, output_dir / EXPORT)
    return content


def surroundings(name: str) -> dict[str, Any]:
    """Versions and machine, with the packages that only the format `name` needs."""
    found = environment(CPU)
    if name == "onnx":
        found["versions"] |= {package: version(package) for package in ONNX_PACKAGES}
    return found


def timed(source: Source, runs: dict[str, nn.Module], images: ImageSet, cfg: EvaluationConfig) -> dict[str, Any] | None:
    """Images per second of the PyTorch model and of every way to run the file; None where that is not asked for."""
    if cfg.throughput_batches == 0:
        return None
    probe = first_batch(images, cfg.batch_size, source.spec, CPU)
    speed = throughput({"pytorch": source.model, **runs}, probe, cfg.throughput_batches)
    return {"batch_size": len(probe), "images_per_second": speed}


def table(content: dict[str, Any]) -> Table:
    """The PyTorch model, and every way to run what was written."""
    found = Table(box=SIMPLE_HEAD, title=f"{content['model']['source']}, exported", title_justify="left")
    labelled = content["pytorch"]["top1"] is not None
    speeds = content["throughput"] and content["throughput"]["images_per_second"]
    classifies = int(content["model"]["args"]["num_classes"]) > 0
    alike, form = ("agreement", "{:.1f}%") if classifies else ("cosine", "{:.4f}")
    columns = ["", "optimised by", "MB", "max |Δlogit|", alike]
    for column in [*columns, *(["top-1"] if labelled else []), *(["images/s"] if speeds else [])]:
        found.add_column(column, justify="left" if column in ("", "optimised by") else "right", no_wrap=True)
    rows = [("PyTorch", "", "", None, content["pytorch"], "pytorch")]
    for file in content["files"]:
        for name, parity in file["parity"].items():
            size = f"{file['bytes'] / 1e6:.1f}"
            rows.append((file["file"], name, size, parity["max_abs_diff"], parity, f"{file['file']}, {name}"))
    for file, name, size, furthest, seen, key in rows:
        cells = ["", ""]
        if furthest is not None:
            cells = [f"{furthest:.1e}", form.format(seen[alike])]
        cells += [f"{seen['top1']:.1f}%"] if labelled else []
        cells += [f"{speeds[key]:.0f}"] if speeds else []
        found.add_row(file, name, size, *cells)
    return found


def run(cfg: ExportConfig, output_dir: Path) -> None:
    """`corp export`: write, compare, and show what was found."""
    with plain_memory_errors():
        content = export_command(cfg, output_dir)
    out, images = console.out(), content["images"]
    out.print(table(content))
    names = ", ".join(file["file"] for file in content["files"])
    labels = f", {images['labelled_images']} of them labelled" if images["labelled_images"] else ""
    out.print(f"Compared on {images['images']} images: {images['source']}{labels}.", markup=False)
    out.print(f"Wrote {names} and {EXPORT} to {output_dir}.", markup=False)
