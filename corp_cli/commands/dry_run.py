"""`corp prune --dry-run`: what a run would cut, and about what it would take. Measures no damage, writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from corp_cli.commands.estimate import likely_sizes, peak_mib, stage_seconds
from corp_cli.commands.probes import Rates, measure_rates
from corp_cli.config.prune import PruneConfig
from corp_cli.export.formats import require_packages
from corp_cli.models.blocks import GROUPS, Sizes
from corp_cli.prepare.work import Work, prepare
from corp_cli.runtime import console
from corp_cli.runtime.memory import plain_memory_errors
from corp_cli.sizes.budget import Budget, matching_fraction
from corp_cli.sizes.costs import cost_of, dense_cost

UNITS = {"params": "parameters", "macs": "MACs"}


@dataclass(frozen=True)
class Outlook:
    """What a run would do; `sizes` are those asked for, or, under a budget, uniform ones that would meet it."""

    work: Work
    sizes: tuple[Sizes, ...]
    counts: dict[str, tuple[int, int]]  # parameters and MACs of one image: dense, pruned
    rates: Rates
    seconds: dict[str, float]  # by stage, estimated
    peak_mib: dict[str, float | None]  # host and device, estimated


def foresee(cfg: PruneConfig) -> Outlook:
    """Load what the run would load, count, and time a forward pass. Raises CorpError where the run would."""
    watch = console.Stopwatch()
    with watch("load"):
        require_packages(cfg.export)
        work = prepare(cfg)
    dense, target, sizes = work.dense, work.target, likely_sizes(work)
    counts = {}
    for kind, label in UNITS.items():
        after = cost_of(dense.spec, dense.blocks, sizes, kind, target.updated_tokens)
        counts[label] = dense_cost(dense.spec, kind), after
    rates = measure_rates(work, work.calibration, cfg.compensation.weighs_logits)
    seconds = watch.seconds | stage_seconds(work, cfg, sizes, rates)
    return Outlook(work, sizes, counts, rates, seconds, peak_mib(work, cfg, rates))


def cuts(outlook: Outlook) -> Table:
    """Kept of dense units by group; a row for every run of blocks that are alike."""
    table = Table("blocks", *GROUPS)
    rows: list[tuple[list[str], list[str]]] = []
    for block, sizes in zip(outlook.work.dense.blocks, outlook.sizes, strict=True):
        pairs = [(getattr(sizes, group), getattr(block.sizes, group)) for group in GROUPS]
        cells = [f"{kept} of {dense}" if kept != dense else f"{dense}" for kept, dense in pairs]
        if not rows or rows[-1][1] != cells:
            rows.append(([], cells))
        rows[-1][0].append(block.name)
    for names, cells in rows:
        table.add_row(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", *cells)
    return table


def budget_line(budget: Budget) -> str:
    """The limit, and that sizes are chosen later."""
    allowed = (1 - budget.fraction) * budget.dense
    if budget.kind == "latency":
        limit = f"{1e3 * allowed:.3g} ms of {1e3 * budget.dense:.3g} ms for a forward pass, timed here"
    else:
        limit = f"{allowed:,.0f} of {budget.dense:,.0f} {UNITS[budget.kind]}"
    after = "it has measured damage" if budget.search == "damage" else "it has scored all units"
    return (
        f"sparsity.{budget.kind}={budget.fraction:g} leaves at most {limit}. The run chooses the sizes of every block "
        f"after {after}; {100 * matching_fraction(budget):.0f}% of every group alike would meet it:"
    )


def lines(outlook: Outlook, cfg: PruneConfig) -> list[str]:
    """What stands below the table."""
    work, rates, images = outlook.work, outlook.rates, outlook.work.images
    found = []
    for label, (dense, pruned) in outlook.counts.items():
        found.append(f"{label:<11} {dense:,} before, {pruned:,} after ({100 * (pruned / dense - 1):+.1f}%)")
    if work.target.updated_tokens is not None:
        found.append(f"{'':<11} the last block updates only tokens that the head reads: {work.target.updated_tokens}")
    if isinstance(work.target, Budget) and work.target.token_costs:
        found.append(f"{'':<11} the run may merge tokens too, where that does less damage than cutting")
    judged = "labelled" if images.evaluation.labelled else "without labels"
    overlap = "none of them calibrated on" if images.held_out else "some or all of them calibrated on"
    stages = ", ".join(f"{name} {console.duration(value)}" for name, value in outlook.seconds.items() if value >= 0.05)
    device = outlook.peak_mib["device"]
    on_device = "" if device is None else f", {device:,.0f} MiB on {work.dense.device}"
    batch, offload = work.calibration.batch_size, work.calibration.offload
    how = f"calibration.batch_size={batch}, calibration.offload={offload}"
    return [
        *found,
        f"{'calibration':<11} {len(images.calibration)} images of {images.calibration.source}",
        f"{'evaluation':<11} {len(images.evaluation)} images of {images.evaluation.source}, {judged}, {overlap}",
        f"{'time':<11} estimate: {console.duration(sum(outlook.seconds.values()))} ({stages})",
        f"{'memory':<11} estimate: {outlook.peak_mib['host']:,.0f} MiB at the peak{on_device}, with {how}",
        *(f"{'left alone':<11} {line}" for line in work.skipped),
        f"Estimates go by short runs timed here: a forward pass takes {1e3 * rates.forward:.3g} ms per image on "
        f"{work.dense.device}. Expect them to be off by a factor of two, by more where the machine is busy. What "
        "a cache holds already saves time.",
    ]


def run(cfg: PruneConfig) -> None:
    """`corp prune --dry-run`: print what would be done."""
    with plain_memory_errors():
        outlook = foresee(cfg)
    out = console.out()
    out.print(f"{cfg.model.name}, {cfg.recipe} recipe: a dry run, nothing is written.", markup=False)
    if isinstance(outlook.work.target, Budget):
        out.print(budget_line(outlook.work.target), markup=False)
    out.print(cuts(outlook))
    for line in lines(outlook, cfg):
        out.print(line, markup=False)
