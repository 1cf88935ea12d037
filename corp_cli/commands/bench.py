"""`corp bench`: latency and throughput of a pruned checkpoint and its dense model, in turns on this machine."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from corp_cli.commands.bench_notes import explain
from corp_cli.config.prune import BenchConfig, ModelConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned, read_manifest
from corp_cli.files.output import write_json
from corp_cli.images.batches import resolve_device
from corp_cli.measure.macs import count_macs
from corp_cli.measure.timing import Setting, Timing, pass_seconds
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import ModelSpec, load_dense, parameters, skeleton
from corp_cli.models.resize import PrunedSizes, resize
from corp_cli.report.report import preprocessing
from corp_cli.runtime import console
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import is_out_of_memory, plain_memory_errors, release

BENCH = "bench.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Subject:
    """A model to time, float32 on the CPU, with its counted size."""

    model: nn.Module
    parameters: int
    macs: int

    def facts(self) -> dict[str, int]:
        """Size, as JSON types."""
        return {"parameters": self.parameters, "macs": self.macs, "flops": 2 * self.macs}


def load(cfg: BenchConfig) -> tuple[ModelSpec, dict[str, Subject]]:
    """The dense model and, with a checkpoint, the pruned one. Dense weights are random: speed does not depend on them.

    Raises CorpError for a file that is not a pruned checkpoint or a model that timm does not know.
    """
    blocks: dict[str, PrunedSizes] = {}
    architecture = ModelConfig(cfg.model.name, pretrained=False, args=cfg.model.args)
    if cfg.checkpoint is not None:
        manifest = read_manifest(cfg.checkpoint)
        blocks = manifest.blocks
        architecture = ModelConfig(manifest.model.name, pretrained=False, args=manifest.model.args)
    dense, spec = load_dense(architecture)
    if cfg.checkpoint is not None:
        spec = manifest.model
    subjects = {"dense": subject(dense, spec, {})}
    if cfg.checkpoint is not None:
        subjects["pruned"] = subject(load_pruned(cfg.checkpoint), spec, blocks)
    return spec, subjects


def subject(model: nn.Module, spec: ModelSpec, blocks: dict[str, PrunedSizes]) -> Subject:
    """`model` with its parameters and MACs, counted on a skeleton of the same shapes."""
    shapes = skeleton(spec)
    resize(shapes, blocks)
    return Subject(model.float(), parameters(shapes), count_macs(shapes, spec.data["input_size"]))


def timing(seconds: list[float], batch_size: int, macs: int, peak: float | None) -> Timing:
    """The figures for forward passes of these `seconds`."""
    p50 = median(seconds)
    p95 = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else p50
    rate = batch_size / p50
    return Timing(len(seconds), 1e3 * p50, 1e3 * p95, rate, rate * macs / 1e9, peak)


@torch.inference_mode()
def peak_mib(model: nn.Module, images: Tensor) -> float | None:
    """Device memory of one forward pass, the model's weights included, in MiB; None where it is not counted.

    The pass also shows whether the device can run the model at all, and warms it up.
    """
    if images.device.type != "cuda":
        model(images)
        return None
    torch.cuda.synchronize(images.device)
    before = torch.cuda.memory_allocated(images.device)
    torch.cuda.reset_peak_memory_stats(images.device)
    model(images)
    torch.cuda.synchronize(images.device)
    weights = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    return (torch.cuda.max_memory_allocated(images.device) - before + weights) / 2**20


def time_setting(
    subjects: dict[str, Subject], models: dict[str, nn.Module], images: Tensor, cfg: BenchConfig
) -> Setting:
    """Time `models` in turns on the batch `images`; where they cannot run, say why."""
    dtype, size = str(images.dtype).removeprefix("torch."), len(images)
    try:
        peaks = {name: peak_mib(model, images) for name, model in models.items()}
        seconds = pass_seconds(models, images, cfg.runs, cfg.max_seconds)
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            return Setting(dtype, size, failure="out of memory")
        if dtype == "float32":
            raise
        return Setting(dtype, size, failure=f"not supported by the device ({str(error).splitlines()[0]})")
    timings = {name: timing(seconds[name], size, subjects[name].macs, peaks[name]) for name in models}
    speedup = timings["dense"].p50_ms / timings["pruned"].p50_ms if "pruned" in timings else None
    return Setting(dtype, size, timings, speedup)


def time_all(
    subjects: dict[str, Subject], input_size: list[int], cfg: BenchConfig, device: torch.device
) -> list[Setting]:
    """Every dtype and batch size asked for, in order."""
    settings = []
    for name in cfg.dtypes:
        dtype = getattr(torch, name)
        models = {key: copy.deepcopy(one.model).to(device, dtype) for key, one in subjects.items()}
        with console.stage(name):
            for size in console.track(cfg.batch_sizes, name, len(cfg.batch_sizes)):
                images = torch.randn(size, *input_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
                settings.append(time_setting(subjects, models, images, cfg))
                release()
    return settings


def bench(cfg: BenchConfig, output_dir: Path) -> dict[str, Any]:
    """Time as `cfg` says and write bench.json → its content."""
    warnings = console.collect_warnings()
    device = resolve_device(cfg.device)
    spec, subjects = load(cfg)
    settings = time_all(subjects, spec.data["input_size"], cfg, device)
    widths = blocks_of(subjects["pruned"].model) if "pruned" in subjects else ()
    for setting in settings:
        setting.notes.extend(explain(setting, settings, {n: s.macs for n, s in subjects.items()}, widths))
        if setting.failure:
            console.warn(f"{setting.dtype}, batch {setting.batch_size}: left out, {setting.failure}.")
    if not any(setting.timings for setting in settings):
        raise CorpError("Nothing could be timed; use smaller batch_sizes, dtypes=[float32] or another device.")
    content = {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "source": cfg.checkpoint or cfg.model.name,
            "timm_name": spec.name,
            "args": spec.args,
            "data": preprocessing(spec),
        },
        "size": {name: subjects[name].facts() if name in subjects else None for name in ("dense", "pruned")},
        "config": asdict(cfg),
        "environment": environment(device),
        "settings": [setting_row(setting) for setting in settings],
        "peak_memory_mib": peak_memory_mib(device),
        "warnings": warnings,
    }
    write_json(content, output_dir / BENCH)
    return content


def setting_row(setting: Setting) -> dict[str, Any]:
    """As JSON types, both models always there."""
    row = asdict(setting)
    return {**row, "timings": {name: row["timings"].get(name) for name in ("dense", "pruned")}}


def table(content: dict[str, Any]) -> Table:
    """One row per dtype and batch size."""
    both = content["size"]["pruned"] is not None
    names = ("dense", "pruned") if both else ("dense",)
    found = Table(
        box=SIMPLE_HEAD,
        title=f"{content['model']['source']} on {content['environment']['device_name']}",
        title_justify="left",
    )
    for column in ("dtype", "batch", *(f"{n}\nms (p95)" for n in names), *(f"{n}\nimg/s" for n in names)):
        found.add_column(column, justify="left" if column == "dtype" else "right", no_wrap=True)
    if both:
        found.add_column("gain", justify="right")
    memory = any(row["timings"]["dense"] and row["timings"]["dense"]["peak_memory_mib"] for row in content["settings"])
    for name in names if memory else ():
        found.add_column(f"{name}\nMiB", justify="right")
    for row in content["settings"]:
        timings = [row["timings"][name] for name in names]
        if None in timings:
            continue
        cells = [f"{t['p50_ms']:.3g} ({t['p95_ms']:.3g})" for t in timings]
        cells += [f"{t['images_per_second']:.0f}" for t in timings]
        cells += [f"x{row['speedup']:.2f}"] if both else []
        cells += [f"{t['peak_memory_mib']:.0f}" for t in timings] if memory else []
        found.add_row(row["dtype"], str(row["batch_size"]), *cells)
    return found


def run(cfg: BenchConfig, output_dir: Path) -> None:
    """`corp bench`: time, write, and show what was found."""
    with plain_memory_errors():
        content = bench(cfg, output_dir)
    out = console.out()
    out.print(table(content))
    for row in content["settings"]:
        for note in row["notes"]:
            out.print(f"{row['dtype']}, batch {row['batch_size']}: {note}", markup=False)
    threads = content["environment"]["torch_threads"]
    where = f"{content['environment']['device']}, {threads} thread{'s' if threads != 1 else ''}"
    out.print(f"Random images, {where}. Wrote {BENCH} to {output_dir}.", markup=False)
