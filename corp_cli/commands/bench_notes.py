"""Why fewer multiply-accumulates are not faster: what the timings themselves say, and nothing that was not measured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from corp_cli.measure.timing import Setting
from corp_cli.models.blocks import Block

FEWER = 0.95  # MACs of the pruned model over the dense one's, below which a gain is to be expected
FASTER = 1.05  # a speed-up below this is none
FEW = 5  # timed passes
SCATTER = 1.5  # p95 over p50 that tells of other work on the machine
FILLS = 1.5  # gain of images/s with the batch that tells of a device not filled
FLAT = 1.3  # a pass with more images over one with fewer, below which its time is not spent on the images
BUSY = 0.5  # rate of MACs over the best rate seen, below which the time goes elsewhere
ALIGNED = 8  # widths that matrix kernels like


def explain(setting: Setting, settings: Iterable[Setting], macs: dict[str, int], pruned: Sequence[Block]) -> list[str]:
    """Notes on one setting among all `settings`; `macs` by model, `pruned` the blocks of the pruned model."""
    if not setting.timings:
        return []
    measured = [other for other in settings if other.timings]
    notes = list(slow_dtype(setting, measured))
    if setting.speedup is None or macs["pruned"] > FEWER * macs["dense"] or setting.speedup >= FASTER:
        return notes
    fewer = 100 * (1 - macs["pruned"] / macs["dense"])
    found = [
        *scatter(setting),
        *launches(setting, measured),
        *small_batch(setting, measured),
        *low_rate(setting, measured),
        *odd_widths(pruned),
    ]
    found = found or list(narrow(setting))
    why = "; ".join(found) if found else "the timings do not show why; profile it with torch.profiler"
    return [f"{fewer:.0f}% fewer MACs, but x{setting.speedup:.2f} the speed: {why}.", *notes]


def slow_dtype(setting: Setting, measured: list[Setting]) -> Iterable[str]:
    """A low-precision dtype slower than float32 at the same batch size."""
    for other in measured:
        if (other.dtype, other.batch_size) == ("float32", setting.batch_size) and setting.dtype != "float32":
            ratio = other.timings["dense"].p50_ms / setting.timings["dense"].p50_ms
            if ratio < 1:
                yield f"the dense model runs at x{ratio:.2f} its float32 speed: {setting.dtype} does not pay here."


def scatter(setting: Setting) -> Iterable[str]:
    """Timings too few or too uneven to trust."""
    runs = min(timing.runs for timing in setting.timings.values())
    if runs < FEW:
        yield f"{runs} timed pass{'es' if runs > 1 else ''} tell little, so raise runs or max_seconds"
    worst = max(timing.p95_ms / timing.p50_ms for timing in setting.timings.values())
    if worst > SCATTER:
        load = f" (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)" if hasattr(os, "getloadavg") else ""
        yield f"timings scatter, p95 is x{worst:.1f} the median{load}, so repeat it on a quiet machine"


def launches(setting: Setting, measured: list[Setting]) -> Iterable[str]:
    """Passes that take as long with fewer or more images: starting each layer is what takes the time."""
    same = [other for other in measured if other.dtype == setting.dtype and other.batch_size != setting.batch_size]
    for other in same:
        small, large = sorted((setting, other), key=lambda one: one.batch_size)
        ratio = large.timings["pruned"].p50_ms / small.timings["pruned"].p50_ms
        if large.batch_size >= 2 * small.batch_size and ratio < FLAT:
            here, there = (one.timings["pruned"].p50_ms for one in (setting, other))
            yield (
                f"a pass takes {here:.3g} ms at this batch and {there:.3g} ms at batch {other.batch_size}, so starting "
                "the layers takes the time, not computing them"
            )
            return


def small_batch(setting: Setting, measured: list[Setting]) -> Iterable[str]:
    """A larger batch that the device handles much faster per image."""
    rate = setting.timings["pruned"].images_per_second
    same = [other for other in measured if other.dtype == setting.dtype and other.batch_size > setting.batch_size]
    best = max(same, key=lambda other: other.timings["pruned"].images_per_second, default=None)
    if best is not None and best.timings["pruned"].images_per_second > FILLS * rate:
        gain = best.timings["pruned"].images_per_second / rate
        yield f"the batch is too small to fill the device, batch {best.batch_size} gives x{gain:.1f} the images/s"


def low_rate(setting: Setting, measured: list[Setting]) -> Iterable[str]:
    """Arithmetic far below what the device does elsewhere: memory traffic and the launching of kernels dominate."""
    best = max(measured, key=lambda other: other.timings["dense"].gmacs_per_second)
    here, there = (one.timings["dense"].gmacs_per_second for one in (setting, best))
    if here < BUSY * there:
        yield (
            f"even the dense model does {here:.0f} GMAC/s where {best.dtype} at batch {best.batch_size} does "
            f"{there:.0f}, so most of the time goes to memory traffic and overheads, which pruning hardly cuts"
        )


def narrow(setting: Setting) -> Iterable[str]:
    """Layers whose new widths the kernels handle worse than the old ones: said where nothing else was found."""
    dense, after = (setting.timings[name].gmacs_per_second for name in ("dense", "pruned"))
    if after < dense:
        yield f"the narrower layers multiply less efficiently, {after:.0f} against {dense:.0f} GMAC/s"


def odd_widths(pruned: Sequence[Block]) -> Iterable[str]:
    """Widths that kernels handle badly, whatever else there is."""
    sizes = {group: {getattr(block.sizes, group) for block in pruned} for group in ("mlp", "qk", "vo")}
    odd = [f"{group} {size}" for group, found in sizes.items() for size in sorted(found) if size % ALIGNED]
    if odd:
        yield f"widths that are no multiples of {ALIGNED} ({', '.join(odd[:4])}), which sparsity.round_to=8 avoids"
    if any(block.sizes.qk != block.sizes.vo for block in pruned):
        yield "queries and values of different widths, for which attention kernels are slower or pad"
