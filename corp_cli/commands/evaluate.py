"""`corp evaluate`: a pruned checkpoint or a dense model on labelled images, or side by side on any."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from corp_cli.config.checkpoints import EvaluateConfig
from corp_cli.config.images import EvaluationConfig
from corp_cli.config.shareable import shareable
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import pruned_model
from corp_cli.files.output import write_json, write_whole
from corp_cli.images.batches import resolve_device
from corp_cli.images.sources import ImageSet
from corp_cli.measure.judge import measure
from corp_cli.measure.metrics import ClassResult
from corp_cli.measure.precision import require_precision
from corp_cli.measure.timing import throughput
from corp_cli.method.memory import bring
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.models.offload import kept_in
from corp_cli.models.preprocess import describe
from corp_cli.models.spec import ModelSpec
from corp_cli.prepare.batches import first_batch, tracked_batches
from corp_cli.prepare.images import asked_images, head_of, intake_of, warn_near_chance
from corp_cli.report.parts import JudgedImages, Throughput
from corp_cli.report.report import image_facts, model_facts
from corp_cli.report.schema import EVALUATION, EvaluationReport, Results
from corp_cli.runtime import console
from corp_cli.runtime.console import Stopwatch
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import halving_batches, plain_memory_errors

PER_CLASS = "per_class.csv"
ROWS = (
    ("top-1", "top1", "{:.1f}%"),
    ("top-5", "top5", "{:.1f}%"),
    ("loss", "loss", "{:.3f}"),
    ("calibration error", "calibration_error", "{:.1f}%"),
    ("agreement", "agreement", "{:.1f}%"),
    ("KL to reference", "kl", "{:.3g}"),
    ("k-NN top-1", "knn_top1", "{:.1f}%"),
    ("cosine to reference", "cosine", "{:.4f}"),
    ("CKA with reference", "cka", "{:.4f}"),
)
FIDELITY = ("agreement", "kl", "cosine", "cka")  # to the reference; that of the reference itself is not shown


def load(cfg: EvaluateConfig) -> tuple[LoadedModel, LoadedModel | None]:
    """(the model to evaluate, its reference): a dense model alone has none. Raises CorpError if they do not fit."""
    dense = dense_model(cfg.model, cfg.data, cfg.seed) if cfg.model.name else None
    if cfg.checkpoint is None:
        assert dense is not None  # EvaluateConfig asks for one of them
        return dense, None
    pruned = pruned_model(cfg.checkpoint, cfg.data)
    if dense is not None:
        require_comparable(pruned, dense)
    return pruned, dense


def require_comparable(pruned: LoadedModel, dense: LoadedModel) -> None:
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
    if pruned.manifest and dense.sha256 != pruned.manifest.dense_sha256:
        console.warn(f"{dense.source} has other weights than the dense model that {pruned.source} was made from.")


def images_to_judge(cfg: EvaluateConfig, judged: LoadedModel) -> ImageSet:
    """The images asked for, or those of a bundled model, labelled where their folders name classes."""
    path = cfg.evaluation.path
    if path is None and cfg.model.name in BUNDLED:
        path = str(BUNDLED[cfg.model.name].evaluation)
    if path is None:
        raise CorpError("There are no images to evaluate on; set evaluation.path to a folder of some.")
    return asked_images(cfg.evaluation, path, head_of(judged.model), cfg.seed)


def evaluate_command(cfg: EvaluateConfig, output_dir: Path) -> EvaluationReport:
    """Evaluate as `cfg` says; write evaluation.json → its content, and, with labels, per_class.csv."""
    watch, warnings = Stopwatch(), console.collect_warnings()
    device = resolve_device(cfg.device)
    require_precision(device, cfg.evaluation.precision)
    with watch("load"):
        judged, reference = load(cfg)
        images = images_to_judge(cfg, judged)
        intake = intake_of(images, cfg.evaluation, "evaluation")
        if not images.labelled and reference is None:
            raise CorpError(
                f"There is nothing to measure: no folder of {images.source} names a class of the model, and there is "
                "no reference; give evaluation.path sub-folders named by class, or compare with model=… checkpoint=…"
            )
        facts = model_facts(judged), model_facts(reference) if reference else None
        models = {"model": judged.model}
        if reference:
            models["reference"] = reference.model
        bring(models.values(), device)
    with watch("evaluate"):
        metrics = halving_batches(
            lambda c: measure(
                models,
                tracked_batches(images, c, judged.spec, device, intake),
                "reference" if reference else None,
                c.precision,
            ),
            cfg.evaluation,
            "evaluation",
        )
    if reference or cfg.checkpoint is None:  # a pruned model alone may well be no better than chance
        dense = metrics["reference" if reference else "model"]
        warn_near_chance(dense.result().top1, dense.labelled(), int(judged.spec.args["num_classes"]))
    with watch("throughput"):
        speed = halving_batches(lambda c: timed(models, images, judged.spec, c, device), cfg.evaluation, "evaluation")
    report = EvaluationReport(
        model=facts[0],
        reference=facts[1],
        config=asdict(cfg),
        seed=cfg.seed,
        environment=environment(device),
        precision=cfg.evaluation.precision,
        images=JudgedImages(**vars(image_facts(images, intake)), labelled_images=metrics["model"].labelled()),
        results=Results(metrics["model"].result(), metrics["reference"].result() if reference else None),
        throughput=speed,
        stage_seconds=watch.seconds,
        peak_memory_mib=peak_memory_mib(device),
        warnings=warnings,
    )
    report = shareable(report, cfg)
    write_json(asdict(report), output_dir / EVALUATION)
    if rows := metrics["model"].per_class():
        write_per_class(rows, output_dir / PER_CLASS)
    return report


def timed(
    models: dict[str, nn.Module], images: ImageSet, spec: ModelSpec, cfg: EvaluationConfig, device: torch.device
) -> Throughput | None:
    """Images per second of the models on the first batch; None where that is not asked for, or weights come and go."""
    if cfg.throughput_batches == 0 or any(map(kept_in, models.values())):
        return None
    probe = first_batch(images, cfg.batch_size, spec, device)
    return Throughput(len(probe), throughput(models, probe, cfg.throughput_batches, cfg.precision))


def write_per_class(rows: list[ClassResult], path: Path) -> None:
    """One line per class: its index, its images, and the percentage right at the first and among five guesses."""

    def write(file: Any) -> None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("class", "images", "top1", "top5"))
        for row in rows:
            shares = (f"{100 * hits / row.images:.6g}" for hits in (row.top1, row.top5))
            writer.writerow((row.index, row.images, *shares))

    write_whole(path, write)


def table(report: EvaluationReport) -> Table:
    """The results, a column for each model."""
    results = {name: result for name, result in vars(report.results).items() if result}
    found = Table(title=report.model.source, title_justify="left")
    for column in ("", *results):
        found.add_column(column, justify="left" if column == "" else "right")
    for label, key, form in ROWS:
        if getattr(report.results.model, key) is None:
            continue
        cells = []
        for name, result in results.items():
            interval = getattr(result, f"{key}_interval", None)
            spread = f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else ""
            itself = name == "reference" and key in FIDELITY
            cells.append("" if itself else form.format(getattr(result, key)) + spread)
        found.add_row(label, *cells)
    if report.throughput:
        found.add_row("images/s", *(f"{report.throughput.images_per_second[name]:.0f}" for name in results))
    return found


def run(cfg: EvaluateConfig, output_dir: Path) -> None:
    """`corp evaluate`: measure, write, and show what was found."""
    with plain_memory_errors():
        report = evaluate_command(cfg, output_dir)
    out, images = console.out(), report.images
    out.print(table(report))
    out.print(f"Images seen at {describe(vars(report.model.data))}.", markup=False)
    scored = report.results.model.top1 is not None
    intervals = " Intervals are Wilson's at 95%." if scored else ""
    labelled = f"{images.labelled_images} of them labelled.{intervals}"
    out.print(f"{images.images} images of {images.source}, {labelled}", markup=False)
    files = f"{EVALUATION} and {PER_CLASS}" if scored else EVALUATION
    out.print(f"Wrote {files} to {output_dir}.", markup=False)
