"""What this machine takes, in seconds: short runs of reading, of passes and of every solve, timed here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from corp_cli.config.images import CalibrationConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.linalg.gauss_newton import Layers, Tokens, gauss_newton
from corp_cli.linalg.moments import RunningMoments, select_moments
from corp_cli.linalg.reduced_rank import HeadMaps, sweep
from corp_cli.linalg.ridge import refit
from corp_cli.measure.precision import products
from corp_cli.measure.timing import pass_seconds, synchronize
from corp_cli.method.calibrate import Calibration, accumulation_device
from corp_cli.method.compensate import compensate_mlp
from corp_cli.method.fit_mlp import RIDGES as FIT_RIDGES
from corp_cli.method.fit_mlp import ROUNDS, coarse_for
from corp_cli.method.fit_values import RIDGES as VALUE_RIDGES
from corp_cli.method.fit_values import SWEEPS
from corp_cli.method.memory import fitted_tokens, head_group
from corp_cli.method.rank import RANKERS, RankerArgs, Scores
from corp_cli.method.statistics import BlockStatistics
from corp_cli.models.adapter import hidden_units, mlp_weights
from corp_cli.models.blocks import MlpWeights, Sizes
from corp_cli.models.streams import tokens
from corp_cli.prepare.batches import first_batch
from corp_cli.prepare.work import Work
from corp_cli.runtime.environment import peak_memory_mib

PROBES = 16  # images that are read to time reading
PASS_SECONDS = 0.5  # a timed pass takes about this at most
PASSES, MAX_SECONDS = 20, 2.0
SOLVED = 512  # channels of the solves that are timed; wider ones are extrapolated
FITTED = 4096  # tokens of the refit of MLPs that is timed
ROWS = 256  # and of that of values


@dataclass(frozen=True)
class Rates:
    """What this machine takes: seconds for one image, memory so far."""

    forward: float  # through the dense model, in calibration.precision
    judged: float  # the same in float32, as models are judged
    calibrate: float  # the same, with all statistics
    read: float  # to decode and prepare it, in one process
    tokens: int  # at the first block, for one image
    width: int  # of each
    batch: int  # images in the passes that were timed
    host_mib: float


def measure_rates(work: Work, cfg: CalibrationConfig, weighs: bool = False) -> Rates:
    """Time reading, forward passes and calibration on a few images, for a few seconds at most."""
    dense, calibration = work.dense, work.images.calibration
    few = calibration.subset(list(range(min(PROBES, len(calibration)))))
    image = first_batch(few, PROBES, dense.spec, dense.device)[:1]
    start = time.perf_counter()
    first_batch(few, PROBES, dense.spec, dense.device)  # again: the first time is not only reading
    read = (time.perf_counter() - start) / len(few)
    alone = min(pass_seconds({"dense": dense.model}, image, 3)["dense"])
    size = max(1, min(cfg.batch, int(PASS_SECONDS / alone)))
    images = image.repeat(size, 1, 1, 1)

    def passes() -> float:
        return median(pass_seconds({"dense": dense.model}, images, PASSES, MAX_SECONDS)["dense"]) / size

    sums = Calibration(dense.model, dense.blocks, work.groups, weighs)
    with products(cfg.precision, dense.device):
        forward = passes()
        calibrate = min(seconds(lambda: sums.add(images), dense.device) for _ in range(2)) / size
    judged = forward if cfg.precision == "float32" else passes()
    with torch.inference_mode():
        stream = tokens(dense.model, image)
    count, width = stream.numel() // stream.shape[-1], stream.shape[-1]
    return Rates(forward, judged, calibrate, read, count, width, size, peak_memory_mib(dense.device).host)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """What `work` takes."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Solves:
    """Seconds of the solves of MLPs, summed over blocks. Those of attention are small beside them."""

    rank: float = 0.0
    compensate: float = 0.0
    refit: float = 0.0


def measure_solves(work: Work, cfg: PruneConfig, outputs: int) -> Solves:
    """Every solve on random moments, extrapolated to the width of every MLP by how it grows from a half to a whole."""
    if "mlp" not in work.groups:
        return Solves()
    widths = [block.sizes.mlp for block in work.dense.blocks if block.sizes.mlp > 0]
    largest = min(SOLVED, max(widths, default=2))
    half, whole = (solve_seconds(work, cfg, max(2, width), outputs) for width in (largest // 2, largest))
    total = {}
    for name, at_whole in vars(whole).items():
        growth = min(3.0, max(1.0, math.log2(at_whole / getattr(half, name))))
        total[name] = sum(at_whole * (width / largest) ** growth for width in widths)
    return Solves(**total)


def solve_seconds(work: Work, cfg: PruneConfig, width: int, outputs: int) -> Solves:
    """Of one MLP with `width` hidden channels."""
    home = accumulation_device(work.dense.device)
    generator = torch.Generator().manual_seed(0)
    joint = RunningMoments(width + outputs, home)
    joint.add(torch.randn(2 * (width + outputs), width + outputs, generator=generator).to(home))
    moments = joint.result()
    hidden, every = select_moments(moments, torch.arange(width, device=home)), torch.arange(width, device=home)
    fc2 = torch.randn(outputs, width, generator=generator, dtype=torch.float64).to(home)
    mlp, args = (
        MlpWeights((fc2.T,), (None,), fc2, None),
        RankerArgs.seeded(cfg.seed, cfg.compensation.ridge, (Scores(mlp=fc2[0]),)),
    )
    ranker = RANKERS["mlp"][cfg.ranker.mlp]

    solves: dict[str, Callable[[], object]] = {
        "rank": lambda: ranker(mlp, BlockStatistics(hidden=hidden), args),
        "compensate": lambda: compensate_mlp(mlp, hidden, every[: width // 2], cfg.compensation),
        "refit": lambda: refit(fc2, moments, cfg.compensation.ridge),
    }
    return Solves(**{name: min(seconds(solve, home) for _ in range(2)) for name, solve in solves.items()})


def fit_seconds(work: Work, cfg: PruneConfig, sizes: tuple[Sizes, ...], rates: Rates) -> float:
    """Of the refit of every MLP that is cut: one round on random tokens of the widest, by what is to be fitted.

    Images kept aside end it before the last round in most layers: half of the rounds are counted.
    """
    dense, how = work.dense, cfg.compensation
    cut = [new.mlp for new, block in zip(sizes, dense.blocks, strict=True) if new.mlp < block.sizes.mlp]
    if how.mlp != "gauss_newton" or not cut:
        return 0.0
    widest = next(block for block in dense.blocks if block.sizes.mlp == max(b.sizes.mlp for b in dense.blocks))
    weights, units, generator = mlp_weights(dense.model, widest), max(cut), torch.Generator().manual_seed(0)
    inputs, outputs = weights.fc1[0].shape[1], len(weights.fc2)
    count = min(how.fit_tokens, len(work.images.calibration) * rates.tokens)
    few = min(count, FITTED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dense.device)

    first = normal(len(weights.fc1), units, inputs) / inputs**0.5
    layers = Layers(first, normal(outputs, units) / units**0.5, normal(outputs))
    seen = Tokens(normal(few, inputs), normal(few, outputs), torch.full((few,), 1 / few, device=dense.device))
    act = hidden_units(dense.model, widest)
    coarse = coarse_for(layers)
    one = min(
        seconds(lambda: gauss_newton(layers, act, seen, seen, FIT_RIDGES, 1, how.ridge, coarse), dense.device)
        for _ in "ab"
    )
    return one * ROUNDS[cfg.compensation.propagate] / 2 * count / few * sum(cut) / units


def value_seconds(work: Work, cfg: PruneConfig, sizes: tuple[Sizes, ...], rates: Rates) -> float:
    """Of the refit of values where they are cut: one head's share of a sweep, and some rows of the moments, timed.

    A bound from above, as that of MLPs; every group of heads goes through the attention of all images twice.
    """
    dense, how = work.dense, cfg.compensation
    cut = [new for new, block in zip(sizes, dense.blocks, strict=True) if new.vo < block.sizes.vo]
    if how.vo != "reduced_rank" or not cut:
        return 0.0
    home, generator = accumulation_device(dense.device), torch.Generator().manual_seed(0)
    width, group = min(SOLVED, rates.width), head_group(work.load)
    joint = RunningMoments(2 * width, home)
    joint.add(torch.randn(4 * width, 2 * width, generator=generator).to(home))
    rank = min(width, max(new.vo for new in cut))
    encode, decode = torch.randn(1, rank, width, generator=generator), torch.randn(1, width, rank, generator=generator)
    heads, moments = HeadMaps(encode.double().to(home), decode.double().to(home)), joint.result()
    towards = torch.zeros(1, width, width, dtype=torch.float64, device=home)
    solve = min(seconds(lambda: sweep(heads, towards, moments, how.ridge), home) for _ in "ab")
    rows = torch.randn(ROWS, (group + 1) * rates.width, generator=generator).to(dense.device)
    sums = RunningMoments(rows.shape[1], home)
    added = min(seconds(lambda: sums.add(rows), dense.device) for _ in "ab")
    every, groups = sum(new.heads for new in cut), sum(-(-new.heads // group) for new in cut)
    sweeps = len(VALUE_RIDGES) + SWEEPS - 1
    passes = work.load.images * rates.forward * groups / len(dense.blocks)
    return (
        every * sweeps * solve * (rates.width / width) ** 3
        + groups * added * fitted_tokens(work.load, how) / ROWS
        + passes
    )
