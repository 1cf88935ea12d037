"""`corp bench`: latency and throughput of a pruned checkpoint and its dense model, in turns on this machine."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from corp_cli.config.checkpoints import BenchConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.config.shareable import shareable
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import pruned_model
from corp_cli.files.output import write_json
from corp_cli.images.batches import resolve_device
from corp_cli.measure.timing import pass_seconds
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.report.parts import NamedModel
from corp_cli.report.report import data_of
from corp_cli.report.schema import BENCH, BenchReport, Setting, TimedSize, Timing, Timings
from corp_cli.runtime import console
from corp_cli.runtime.environment import environment, peak_memory_mib
from corp_cli.runtime.memory import is_out_of_memory, plain_memory_errors, release

NEARLY = 0.9  # of the gain that MACs promise: what is left needs no explanation


def load(cfg: BenchConfig) -> dict[str, LoadedModel]:
    """The dense model and, with a checkpoint, the pruned one. Dense weights are random: speed does not depend on them.

    Raises CorpError for a file that is not a pruned checkpoint or a model that timm does not know.
    """
    if cfg.checkpoint is None:
        return {"dense": dense_model(ModelConfig(cfg.model.name, pretrained=False, args=cfg.model.args))}
    pruned = pruned_model(cfg.checkpoint)
    dense = dense_model(ModelConfig(pruned.spec.name, pretrained=False, args=pruned.spec.args))
    return {"dense": replace(dense, spec=pruned.spec), "pruned": pruned}


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


def time_setting(models: dict[str, nn.Module], macs: dict[str, int], images: Tensor, cfg: BenchConfig) -> Setting:
    """Time `models` in turns on the batch `images`; where they cannot run, say why."""
    dtype, size = str(images.dtype).removeprefix("torch."), len(images)
    try:
        peaks = {name: peak_mib(model, images) for name, model in models.items()}
        seconds = pass_seconds(models, images, cfg.runs, cfg.max_seconds)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and dtype == "float32":
            raise
        unsupported = f"not supported by the device ({str(error).splitlines()[0]})"
        failure = "out of memory" if is_out_of_memory(error) else unsupported
        return Setting(dtype, size, Timings(), None, failure, [])
    timings = {name: timing(seconds[name], size, macs[name], peaks[name]) for name in models}
    speedup = timings["dense"].p50_ms / timings["pruned"].p50_ms if "pruned" in timings else None
    return Setting(dtype, size, Timings(**timings), speedup, None, [])


def explain(setting: Setting, settings: Iterable[Setting], macs: dict[str, int]) -> list[str]:
    """What limits one setting among all `settings`: a short line, of what was measured alone.

    None where pruning gains nearly what fewer MACs promise.
    """
    dense, pruned, speedup = setting.timings.dense, setting.timings.pruned, setting.speedup
    if dense is None or pruned is None or speedup is None or macs["pruned"] >= macs["dense"]:
        return []
    hoped = macs["dense"] / macs["pruned"]
    if speedup > NEARLY * hoped:
        return []
    alike = (one.timings.dense for one in settings if one.dtype == setting.dtype)
    fullest = max(one.gmacs_per_second for one in alike if one)
    if max(one.p95_ms - one.p50_ms for one in (dense, pruned)) > abs(pruned.p50_ms - dense.p50_ms):
        limit = "passes scatter more than models differ"
    elif dense.gmacs_per_second < fullest / 2:
        limit = "too small a batch to keep the device busy"
    else:
        share = 100 * pruned.gmacs_per_second / dense.gmacs_per_second
        limit = f"narrower layers do {share:.0f}% of the MAC/s"
    return [f"x{speedup:.2f} of x{hoped:.2f}, {limit}"]


def time_all(
    subjects: dict[str, LoadedModel], macs: dict[str, int], cfg: BenchConfig, device: torch.device
) -> list[Setting]:
    """Every dtype and batch size asked for, in order."""
    settings, input_size = [], subjects["dense"].spec.data["input_size"]
    for name in cfg.dtypes:
        dtype = getattr(torch, name)
        models = {key: copy.deepcopy(one.model).to(device, dtype) for key, one in subjects.items()}
        with console.stage(name):
            for size in console.track(cfg.batch_sizes, name, len(cfg.batch_sizes)):
                images = torch.randn(size, *input_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
                settings.append(time_setting(models, macs, images, cfg))
                release()
    return [replace(setting, notes=explain(setting, settings, macs)) for setting in settings]


def bench(cfg: BenchConfig, output_dir: Path) -> BenchReport:
    """Time as `cfg` says and write bench.json → its content."""
    warnings = console.collect_warnings()
    device = resolve_device(cfg.device)
    subjects = load(cfg)
    spec, counts = subjects["dense"].spec, {name: one.count() for name, one in subjects.items()}
    settings = time_all(subjects, {name: found.macs for name, found in counts.items()}, cfg, device)
    for setting in settings:
        if setting.failure:
            console.warn(f"{setting.dtype}, batch {setting.batch_size}: left out, {setting.failure}.")
    if all(setting.failure for setting in settings):
        raise CorpError("Nothing could be timed; use smaller batch_sizes, dtypes=[float32] or another device.")
    report = BenchReport(
        model=NamedModel(cfg.checkpoint or cfg.model.name, spec.name, spec.args, data_of(spec)),
        size=TimedSize(counts["dense"], counts.get("pruned")),
        config=asdict(cfg),
        environment=environment(device),
        settings=settings,
        peak_memory_mib=peak_memory_mib(device),
        warnings=warnings,
    )
    report = shareable(report, cfg)
    write_json(asdict(report), output_dir / BENCH)
    return report


def table(report: BenchReport) -> Table:
    """One row per dtype and batch size, in 80 columns."""
    names = ("dense", "pruned") if report.size.pruned else ("dense",)
    title = f"{report.model.source} on {report.environment.device_name}, medians"
    found = Table(box=SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    memory = report.environment.device.startswith("cuda")
    measures = ("ms", "gain", "img/s", *(("MiB",) if memory else ()))
    found.add_column("dtype")
    found.add_column("batch", justify="right")
    for measure in measures:
        if measure != "gain":
            for name in names:
                found.add_column(f"{measure}\n{name}", justify="right", no_wrap=True)
        elif report.size.pruned:
            found.add_column(measure, justify="right")
    for row in report.settings:
        timings: list[Timing] = [timing for name in names if (timing := getattr(row.timings, name))]
        if not timings:
            continue
        cells = [in_digits(t.p50_ms) for t in timings]
        cells += [f"x{row.speedup:.2f}"] if row.speedup else []
        cells += [in_digits(t.images_per_second) for t in timings]
        cells += [f"{t.peak_memory_mib:.0f}" for t in timings] if memory else []
        found.add_row(row.dtype, str(row.batch_size), *cells)
    return found


def in_digits(value: float) -> str:
    """Three digits that count, and no power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def run(cfg: BenchConfig, output_dir: Path) -> None:
    """`corp bench`: time, write, and show what was found."""
    with plain_memory_errors():
        report = bench(cfg, output_dir)
    out = console.out()
    out.print(table(report))
    for row in report.settings:
        for note in row.notes:
            out.print(f"{row.dtype}, batch {row.batch_size}: {note}", markup=False)
    threads = report.environment.torch_threads
    where = f"{report.environment.device}, {threads} thread{'s' if threads != 1 else ''}"
    out.print(f"Random images, {where}. Wrote {BENCH} to {output_dir}.", markup=False)
