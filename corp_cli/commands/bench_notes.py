"""Why fewer multiply-accumulates are not faster: one line a row, of what was measured alone."""

from __future__ import annotations

from collections.abc import Iterable

from corp_cli.report.schema import Setting


def explain(setting: Setting, settings: Iterable[Setting], macs: dict[str, int]) -> list[str]:
    """What limits one setting among all `settings`, with the `macs` of the models; empty where pruning gains speed."""
    dense, pruned = setting.timings.dense, setting.timings.pruned
    if dense is None or pruned is None or macs["pruned"] >= macs["dense"] or pruned.p50_ms < dense.p50_ms:
        return []
    hoped = macs["dense"] / macs["pruned"]
    # The best of all settings is another one, if it brings more than pruning could bring here.
    rates = {
        (one.dtype, one.batch_size): one.timings.pruned.images_per_second for one in settings if one.timings.pruned
    }
    dtype, batch = max(rates, key=lambda key: rates[key])
    gain = rates[dtype, batch] / pruned.images_per_second
    if gain > hoped:
        limit = f"{dtype} at batch {batch} gives x{gain:.1f} the images/s, more than fewer MACs can"
    elif max(one.p95_ms - one.p50_ms for one in (dense, pruned)) > pruned.p50_ms - dense.p50_ms:
        limit = "the passes scatter by more than the models differ, so repeat it on a quiet machine"
    else:
        rate, whole = pruned.gmacs_per_second, dense.gmacs_per_second
        limit = f"the narrower layers do {rate:.3g} GMAC/s, the dense ones {whole:.3g}"
    return [f"{100 * (1 - 1 / hoped):.0f}% fewer MACs, x{dense.p50_ms / pruned.p50_ms:.2f} the speed: {limit}."]
