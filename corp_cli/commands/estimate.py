"""What a run will take, in seconds and MiB: by short runs of its stages, which probes.py times, and by shapes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from corp_cli.commands.probes import Rates, Solves, fit_seconds, measure_rates, measure_solves, value_seconds
from corp_cli.config.prune import PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.images.batches import readers
from corp_cli.images.sources import ImageSet
from corp_cli.measure.precision import products
from corp_cli.measure.timing import ENOUGH, WARM_UP
from corp_cli.method.fit_one_shot import TRIAL_IMAGES, TRIAL_TOKENS
from corp_cli.method.memory import DOUBLE, FLOAT, Need, activations, most, needs, statistics_bytes
from corp_cli.method.optin import COPIES, asked_of, units_of
from corp_cli.models.blocks import Sizes
from corp_cli.prepare.work import Work
from corp_cli.runtime.environment import cores
from corp_cli.runtime.memory import plain_memory_errors, room_of
from corp_cli.runtime.scratch import on_device
from corp_cli.sizes.budget import Budget, matching_fraction, uniform
from corp_cli.sizes.costs import cost_of, dense_cost
from corp_cli.sizes.curves import ANCHORS, MERGED
from corp_cli.sizes.plan import contexts

MIB = 2**20


def expected_seconds(work: Work, cfg: PruneConfig) -> dict[str, float]:
    """Seconds of the long stages, by their names in the report, from short runs; none where these cannot be done."""
    try:
        with plain_memory_errors():
            rates = measure_rates(work, work.calibration, cfg.compensation.weighs_logits)
            return stage_seconds(work, cfg, likely_sizes(work), rates)
    except CorpError:  # if that is in the way of the run too, the run says so
        return {}


def likely_sizes(work: Work) -> tuple[Sizes, ...]:
    """Those asked for, or, under a budget, uniform ones that would meet it."""
    target = work.target
    return uniform(target, matching_fraction(target)) if isinstance(target, Budget) else target.sizes


def stage_seconds(work: Work, cfg: PruneConfig, sizes: tuple[Sizes, ...], rates: Rates) -> dict[str, float]:
    """Seconds of the long stages, by their names in the report; `sizes` are those asked for, or near the budget."""
    images, device, solves = work.images.calibration, work.dense.device, measure_solves(work, cfg, rates.width)
    left, f, load, workers = share(work, sizes), rates.forward, work.load, readers(cfg.calibration.num_workers)
    exact = cfg.calibration.precision == "float32"
    with products(work.calibration.precision, device, exact), torch.no_grad():
        fit, values = fit_seconds(work, cfg, sizes, rates), value_seconds(work, cfg, sizes, rates)
    compensate = fit + values
    if not work.along:
        compensate += solves.compensate
        if fit or values:  # the dense stream, what its MLPs give, and what the cut ones give
            again = f if work.measured and load.decoded else feed(f, images, rates, workers, device)
            compensate += len(images) * (again + (2 + left) * f) + solves.refit
    else:
        # Both streams go through the dense blocks, where statistics are taken, and x̂ twice through the cut ones, their
        # MLPs once more where those are refitted.
        again = f if work.measured and load.decoded else feed(f, images, rates, workers, device)
        compensate += len(images) * (again + rates.calibrate + (1 + (3 if fit else 2) * left) * f)
        compensate += (2 if fit else 1) * solves.refit + solves.rank + solves.compensate
    judged, evaluation = work.images.evaluation, cfg.evaluation
    three = feed((1 + 2 * left) * rates.judged, judged, rates, readers(evaluation.num_workers), device)
    turn = min(evaluation.batch_size, len(judged)) * (1 + left) * rates.judged
    timed = min((evaluation.throughput_batches + 1) * turn, max(ENOUGH + turn, (WARM_UP + 3) * turn))
    curves = curve_seconds(work, cfg.sparsity, work.target, rates, solves) if isinstance(work.target, Budget) else 0.0
    if curves and fit:  # tried before sizes are chosen
        tried = min(TRIAL_IMAGES, len(images))
        curves += tried * (rates.read + 4 * f) + fit * min(1.0, TRIAL_TOKENS / cfg.compensation.fit_tokens)
    return {
        "calibrate": len(images) * feed(rates.calibrate, images, rates, workers, device) if work.measured else 0.0,
        "rank": (solves.rank if work.measured else 0.0) + masked_seconds(work, cfg, rates),
        "plan": curves,
        "compensate": compensate,
        "evaluate": len(judged) * three + (timed if evaluation.throughput_batches else 0.0),
    }


def masked_seconds(work: Work, cfg: PruneConfig, rates: Rates) -> float:
    """Of the ranker optin: every unit, masked in turn, through the blocks from its own on."""
    blocks, depth = work.dense.blocks, len(work.dense.blocks)
    asked = enumerate(zip(blocks, asked_of(blocks, work.masked(cfg.ranker)), strict=True))
    passes = sum(units_of(work.dense.model, block, groups) * (depth - i) / depth for i, (block, groups) in asked)
    return min(cfg.ranker.optin_images, len(work.images.calibration)) * passes * rates.forward


def curve_seconds(work: Work, cfg: SparsityConfig, target: Budget, rates: Rates, solves: Solves) -> float:
    """Of every group of every block: the dense size and the anchors, each through the blocks from there on.

    In every context; where tokens may be merged, counts of tokens in every block but the last as well. A
    bound from above: what is the context itself is measured once. Nothing is measured where scores choose.
    """
    if target.search == "scores":
        return 0.0
    anchors, depth = len(next(iter(ANCHORS.values()))), len(work.dense.blocks)
    passes = (1 + anchors) * sum((depth - block) / depth for block, _ in target.wanted())
    if target.token_costs:
        passes += (1 + len(MERGED)) * sum((depth - block) / depth for block in range(depth - 1))
    images, fractions = min(cfg.curve_images, len(work.images.calibration)), contexts(target)
    around = [share(work, uniform(target, fraction)) for fraction in fractions]
    around += [around[-1]] * (cfg.rounds - 1)
    each = sum(rates.read + (2 + left * passes) * rates.forward for left in around)
    return images * each + len(around) * (solves.rank + (1 + anchors) * solves.compensate)


def share(work: Work, sizes: tuple[Sizes, ...], kind: str = "macs") -> float:
    """What `sizes` leave of the MACs, or parameters, of the dense model."""
    spec = work.dense.spec
    return cost_of(spec, work.dense.blocks, sizes, kind) / dense_cost(spec, kind)


def feed(compute: float, images: ImageSet, rates: Rates, workers: int, device: torch.device) -> float:
    """Seconds per image where `workers` read while the device computes; on the CPU both share its cores."""
    if workers == 0 or isinstance(images.items[0], Tensor):
        return compute + rates.read
    longest = max(compute, rates.read / workers)
    if device.type == "cuda":
        return longest
    return max(longest, (min(torch.get_num_threads(), cores()) * compute + rates.read) / cores())


def peak_mib(work: Work, cfg: PruneConfig, rates: Rates) -> dict[str, float | None]:
    """Peak memory in MiB: of this process, and on CUDA of the device; the stage that needs most decides."""
    load, device, settings = work.load, work.dense.device, work.calibration
    found = needs(load, cfg.compensation, settings)
    if work.masked(cfg.ranker):
        one = min(cfg.ranker.optin_images, load.images) * load.tokens * load.width * FLOAT
        masked = max(COPIES * one, min(settings.batch * COPIES * one, room_of(device)))
        held = len(load.blocks) * one + masked
        found["rank"] = replace(found["calibrate"], device=found["calibrate"].device + held)
    if isinstance(work.target, Budget):
        calibrated, images = found["calibrate"], min(cfg.sparsity.curve_images, load.images)
        held = images * (2 * load.tokens * load.width + load.pixels) * FLOAT
        # the copy around, that to cut, and all weights in float64: beside the blocks, wherever those are
        each = load.bytes_each if settings.offload == "blocks" else FLOAT
        whole = load.parameters * DOUBLE, 2 * load.parameters * each
        host, added = (sum(whole), held) if settings.offload == "blocks" else (0, held + sum(whole))
        found["plan"] = Need(calibrated.host + host, calibrated.device + added)
    need = most(found)
    if work.keep is on_device:  # which holds the tokens of all images too
        need = Need(0, need.device + need.host)
    need = replace(need, host=need.host + load.decoded)
    if device.type == "cuda":
        return {"host": rates.host_mib + need.host / MIB, "device": need.device / MIB}
    timed = load.parameters * FLOAT + statistics_bytes(load, load.blocks) + activations(load, rates.batch)
    before = max(0.0, rates.host_mib - timed / MIB)  # the process without what was timed, which is counted again
    return {"host": max(rates.host_mib, before + (need.host + need.device) / MIB), "device": None}
