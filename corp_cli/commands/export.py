"""`corp export`: a pruned checkpoint or a dense model as a file that needs no corp, compared with the PyTorch model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corp_cli.commands.evaluate import timed
from corp_cli.config.checkpoints import ExportConfig
from corp_cli.config.shareable import shareable
from corp_cli.errors import CorpError
from corp_cli.export.formats import PACKAGES, place, require_packages, runs_of, scratch, write_files
from corp_cli.export.parity import compare, random_images
from corp_cli.files.checkpoint import pruned_model
from corp_cli.files.output import require_room, size_in_bytes, write_json
from corp_cli.images.batches import choose
from corp_cli.images.sources import ImageSet
from corp_cli.measure.results import Evaluation
from corp_cli.models.bundled import BUNDLED, BundledModel
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.models.spec import ModelSpec
from corp_cli.prepare.batches import range_batches, tracked_batches
from corp_cli.prepare.images import asked_images, find_images, head_of, intake_of
from corp_cli.report.parts import JudgedImages
from corp_cli.report.report import image_facts, model_facts
from corp_cli.report.schema import EXPORT, ExportReport
from corp_cli.runtime import console
from corp_cli.runtime.console import Stopwatch
from corp_cli.runtime.environment import Environment, environment, peak_memory_mib
from corp_cli.runtime.memory import halving_batches, plain_memory_errors

CPU = torch.device("cpu")


def images_of(cfg: ExportConfig, source: LoadedModel) -> ImageSet:
    """The images asked for, or those of a bundled model or of one pruned from it; else noise."""
    bundled = bundled_model(source.spec)
    path = cfg.evaluation.path or (str(bundled.evaluation) if bundled else None)
    if path is None:
        return random_images(source.spec.data["input_size"], cfg.seed)
    return asked_images(cfg.evaluation, path, head_of(source.model), cfg.seed)


def ranges_of(cfg: ExportConfig, source: LoadedModel) -> ImageSet:
    """The images that static int8 measures ranges on. Raises CorpError where there are none of the kind in use."""
    ranges, judged, bundled = cfg.calibration, cfg.evaluation, bundled_model(source.spec)
    if ranges.path is not None:
        images = find_images(ranges, ranges.path, "calibration.path", ranges.num_images)
    elif judged.path is not None:
        images = find_images(judged, judged.path, "evaluation.path", judged.num_images)
        console.warn(
            "static int8 measures ranges on images that its file is then judged on; set calibration.path to others."
        )
    elif bundled is not None:
        images = find_images(ranges, str(bundled.calibration), "calibration.path", ranges.num_images)
    else:
        raise CorpError(
            f"int8={cfg.int8} measures ranges of activations on images like those in use, and random ones are not; set "
            "calibration.path to a folder of some, or take int8=dynamic, which needs none."
        )
    return choose(images, ranges.num_images, cfg.seed)[0]


def bundled_model(spec: ModelSpec) -> BundledModel | None:
    """The bundled model with this architecture and preprocessing."""
    found = (model for model in BUNDLED.values() if model.timm_name == spec.name and model.data == spec.data)
    return next(found, None)


def export_command(cfg: ExportConfig, output_dir: Path) -> ExportReport:
    """Export as `cfg` says; write the file and export.json → the content of the latter."""
    watch, warnings = Stopwatch(), console.collect_warnings()
    options = cfg.options()
    require_packages(options)
    with watch("load"):
        source = (
            pruned_model(cfg.checkpoint, cfg.data) if cfg.checkpoint else dense_model(cfg.model, cfg.data, cfg.seed)
        )
        facts = model_facts(source)
        source.model.float()
        require_room(output_dir, 3 * size_in_bytes(source.model))  # the file, and copies that it is compared with
        images = images_of(cfg, source)
        intake = intake_of(images, cfg.evaluation, "evaluation")
        ranges = ranges_of(cfg, source) if options.static() else None
        measured = None if ranges is None else intake_of(ranges, cfg.calibration, "calibration")

    def batches() -> Iterator[Tensor]:
        assert ranges is not None
        assert measured is not None
        return range_batches(ranges, cfg.calibration, source.spec, measured)

    with scratch(output_dir) as folder:
        with watch("export"):
            files = write_files(source, options, folder, batches)
        runs = runs_of(files)
        models = {"pytorch": source.model, **runs}
        with watch("compare"):
            itself, parity = halving_batches(
                lambda c: compare(source.model, runs, tracked_batches(images, c, source.spec, CPU, intake)),
                cfg.evaluation,
                "evaluation",
            )
        with watch("throughput"):
            speed = halving_batches(lambda c: timed(models, images, source.spec, c, CPU), cfg.evaluation, "evaluation")
        placed = place(files, parity, output_dir)
    report = ExportReport(
        model=facts,
        config=asdict(cfg),
        seed=cfg.seed,
        environment=surroundings(cfg.format),
        images=JudgedImages(**vars(image_facts(images, intake)), labelled_images=itself.labelled()),
        calibration=image_facts(ranges, measured) if ranges and measured else None,
        pytorch=itself.result(),
        files=placed,
        throughput=speed,
        stage_seconds=watch.seconds,
        peak_memory_mib=peak_memory_mib(CPU),
        warnings=warnings,
    )
    report = shareable(report, cfg)
    write_json(asdict(report), output_dir / EXPORT)
    return report


def surroundings(name: str) -> Environment:
    """Versions and machine, with the packages that only the format `name` needs."""
    found = environment(CPU)
    return replace(found, versions=found.versions | {package: version(package) for package in PACKAGES.get(name, ())})


def table(report: ExportReport) -> Table:
    """The PyTorch model, and every way to run what was written."""
    found = Table(box=SIMPLE_HEAD, title=f"{report.model.source}, exported", title_justify="left")
    labelled = report.pytorch.top1 is not None
    speeds = report.throughput and report.throughput.images_per_second
    classifies = int(report.model.args["num_classes"]) > 0
    alike, form = ("agreement", "{:.1f}%") if classifies else ("cosine", "{:.4f}")
    columns = ["", "optimised\nby", "MB", "max\n|Δlogit|", alike]
    for column in [*columns, *(["top-1"] if labelled else []), *(["images/s"] if speeds else [])]:
        found.add_column(column, justify="left" if column in columns[:2] else "right", no_wrap=True)
    rows: list[tuple[str, list[str], Evaluation]] = [("pytorch", ["PyTorch", "", "", "", ""], report.pytorch)]
    for file in report.files:
        for name, parity in file.parity.items():
            kept = form.format(getattr(parity, alike))
            cells = [file.file, name, f"{file.bytes / 1e6:.1f}", f"{parity.max_abs_diff:.1e}", kept]
            rows.append((f"{file.file}, {name}", cells, parity))
    for key, cells, seen in rows:
        top1 = [f"{seen.top1:.1f}%"] if labelled else []
        found.add_row(*cells, *top1, *([f"{speeds[key]:.0f}"] if speeds else []))
    return found


def run(cfg: ExportConfig, output_dir: Path) -> None:
    """`corp export`: write, compare, and show what was found."""
    with plain_memory_errors():
        report = export_command(cfg, output_dir)
    out, images = console.out(), report.images
    out.print(table(report))
    names = ", ".join(name for file in report.files for name in file.names())
    if ranges := report.calibration:
        out.print(f"Ranges of static int8 measured on {ranges.images} images: {ranges.source}.", markup=False)
    labels = f", {images.labelled_images} of them labelled" if images.labelled_images else ""
    out.print(f"Compared on {images.images} images: {images.source}{labels}.", markup=False)
    out.print(f"Wrote {names} and {EXPORT} to {output_dir}.", markup=False)
