"""What a run will take, in seconds and MiB: from a timed forward pass, from shapes, and from measured factors."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from corp_cli.config.prune import PruneConfig
from corp_cli.files.output import size_in_bytes
from corp_cli.images.sources import ImageSet
from corp_cli.measure.timing import pass_seconds
from corp_cli.method.calibrate import accumulation_device
from corp_cli.models.blocks import Sizes
from corp_cli.models.streams import tokens
from corp_cli.prepare import Inputs, first_batch
from corp_cli.runtime.environment import peak_memory_mib
from corp_cli.sizes.budget import Budget, uniform
from corp_cli.sizes.costs import cost_of
from corp_cli.sizes.curves import ANCHORS, MERGED
from corp_cli.sizes.plan import SizePlan, context_fraction

# In forward passes of the dense model per image, from CPU time on one core for DeiT-Tiny; the bundled model takes up
# to 1.5 times as many.
CALIBRATE = 1.7
START = 1.1  # of sequential repair, which reads the images again
REPAIR = 4.1
CURVE = 0.9  # per block passed, of what the sizes around leave; without patch embedding and head
# In products of float64 matrices as large as the MLP is wide, per block.
OBS, UNCOMPENSATED, COMPENSATE, REFIT, CURVES = 8.6, 2.3, 3.1, 9.0, 60.0
PROBES = 16  # images that are read to time reading
PASS_SECONDS = 0.5  # a timed pass takes about this at most
PASSES, MAX_SECONDS = 20, 2.0
MATRIX = 512
SCATTERED = 1.5  # memory that allocators take, for what is in use
FLOAT, DOUBLE, MIB = 4, 8, 2**20


@dataclass(frozen=True)
class Rates:
    """What this machine takes: seconds for one image, and per multiplication in float64 solves; memory so far."""

    forward: float  # through the dense model
    read: float  # to decode and prepare it, in one process
    multiply: float
    tokens: int  # at the first block, for one image
    width: int  # of each
    batch: int  # images in the passes that were timed
    host_mib: float
    device_mib: float | None  # on CUDA


def measure_rates(inputs: Inputs, cfg: PruneConfig) -> Rates:
    """Time reading and forward passes on a few calibration images, for a few seconds at most."""
    few = inputs.calibration.subset(list(range(min(PROBES, len(inputs.calibration)))))
    image = first_batch(few, PROBES, inputs.spec, inputs.device)[:1]
    start = time.perf_counter()
    first_batch(few, PROBES, inputs.spec, inputs.device)  # again: the first time is not only reading
    read = (time.perf_counter() - start) / len(few)
    alone = min(pass_seconds({"dense": inputs.dense}, image, 3)["dense"])
    size = max(1, min(cfg.calibration.batch_size, int(PASS_SECONDS / alone)))
    images = image.repeat(size, 1, 1, 1)
    whole = median(pass_seconds({"dense": inputs.dense}, images, PASSES, MAX_SECONDS)["dense"])
    with torch.inference_mode():
        stream = tokens(inputs.dense, image)
    multiply, peak = multiply_seconds(inputs.device), peak_memory_mib(inputs.device)
    count, width = stream.numel() // stream.shape[-1], stream.shape[-1]
    return Rates(whole / size, read, multiply, count, width, size, peak.host, peak.device)


def multiply_seconds(device: torch.device) -> float:
    """Seconds of one multiplication in a product of float64 matrices, where the sums are kept."""
    matrix = torch.ones(MATRIX, MATRIX, dtype=torch.float64, device=accumulation_device(device))
    product = torch.nn.Linear(MATRIX, MATRIX, bias=False, dtype=torch.float64, device=matrix.device)
    return median(pass_seconds({"product": product}, matrix, 3)["product"]) / MATRIX**3


# --- seconds --------------------------------------------------------------------------------------------------


def stage_seconds(
    inputs: Inputs, cfg: PruneConfig, target: SizePlan | Budget, sizes: tuple[Sizes, ...], rates: Rates
) -> dict[str, float]:
    """Seconds of the long stages, by their names in the report; `sizes` are those asked for, or near the budget."""
    cubes = rates.multiply * sum(block.sizes.mlp**3 for block in inputs.blocks if "mlp" in inputs.groups)
    images, left, f = len(inputs.calibration), share(inputs, sizes), rates.forward
    obs = "mlp" in inputs.groups and cfg.ranker.mlp == "obs"
    compensate = UNCOMPENSATED * cubes
    if cfg.compensation.propagate == "none":
        compensate += COMPENSATE * cubes
    else:
        again = feed(START * f, inputs.calibration, rates, cfg.calibration.num_workers, inputs.device)
        compensate += images * (again + REPAIR * f) + REFIT * cubes
    judged, evaluation = inputs.evaluation, cfg.evaluation
    three = feed((1 + 2 * left) * f, judged, rates, evaluation.num_workers, inputs.device)
    timed = (evaluation.throughput_batches + 1) * min(evaluation.batch_size, len(judged)) * (1 + left) * f
    return {
        "calibrate": images
        * feed(CALIBRATE * f, inputs.calibration, rates, cfg.calibration.num_workers, inputs.device),
        "rank": OBS * cubes if obs else 0.0,
        "plan": curve_seconds(inputs, cfg, target, rates, cubes) if isinstance(target, Budget) else 0.0,
        "compensate": compensate,
        "evaluate": len(judged) * three + (timed if evaluation.throughput_batches else 0.0),
    }


def curve_seconds(inputs: Inputs, cfg: PruneConfig, target: Budget, rates: Rates, cubes: float) -> float:
    """Of every group of every block: the dense size and the anchors, each through the blocks from there on.

    Where tokens may be merged, counts of tokens in every block but the last as well, and nothing is cut around them. A
    bound from above: what is the context itself is measured once.
    """
    points, depth = 1 + len(next(iter(ANCHORS.values()))), len(inputs.blocks)
    passes = points * sum((depth - block) / depth for block, _ in target.wanted())
    if target.token_costs:
        passes += (1 + len(MERGED)) * sum((depth - block) / depth for block in range(depth - 1))
    around = share(inputs, uniform(target, context_fraction(target)))
    images = min(cfg.sparsity.curve_images, len(inputs.calibration))
    each = rates.read + (2 + CURVE * around * passes) * rates.forward
    return cfg.sparsity.rounds * (images * each + CURVES * cubes)


def share(inputs: Inputs, sizes: tuple[Sizes, ...], kind: str = "macs") -> float:
    """What `sizes` leave of the MACs, or parameters, of the dense model."""
    dense = tuple(block.sizes for block in inputs.blocks)
    return cost_of(inputs.spec, inputs.blocks, sizes, kind) / cost_of(inputs.spec, inputs.blocks, dense, kind)


def feed(compute: float, images: ImageSet, rates: Rates, workers: int, device: torch.device) -> float:
    """Seconds per image where `workers` read while the device computes; on the CPU both share its cores."""
    if workers == 0 or isinstance(images.items[0], Tensor):
        return compute + rates.read
    longest = max(compute, rates.read / workers)
    if device.type == "cuda":
        return longest
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(longest, (min(torch.get_num_threads(), cores) * compute + rates.read) / cores)


# --- memory ---------------------------------------------------------------------------------------------------


def peak_mib(
    inputs: Inputs, cfg: PruneConfig, target: SizePlan | Budget, sizes: tuple[Sizes, ...], rates: Rates
) -> dict[str, float | None]:
    """Peak memory in MiB: of this process, and on CUDA of the device; the stage that needs most decides."""
    model, images = size_in_bytes(inputs.dense), len(inputs.calibration)
    left, sums, stream = share(inputs, sizes, "params") * model, statistics_bytes(inputs), rates.tokens * rates.width
    hidden = max(block.sizes.mlp for block in inputs.blocks)
    pixels = torch.Size(inputs.spec.data["input_size"]).numel()
    passed = (3 * pixels + rates.tokens * (2 * hidden + 6 * rates.width)) * FLOAT  # in a forward pass, of an image
    batch, judged = (
        min(one.batch_size, n) for one, n in ((cfg.calibration, images), (cfg.evaluation, len(inputs.evaluation)))
    )
    hooked = passed * max(0, batch - rates.batch)
    hooked += 3 * batch * rates.tokens * (hidden + rates.width) * FLOAT  # what statistics copy of activations
    stages = {
        "calibrate": (0.0, 2 * sums + hooked),
        "evaluate": (0.0, sums + 2 * left + passed * max(0, judged - rates.batch)),
    }
    if isinstance(target, Budget):
        curve_images = min(cfg.sparsity.curve_images, images)
        held = curve_images * (2 * stream + pixels) * FLOAT
        stages["plan"] = (0.0, sums + held + model + 2 * model + hooked)  # the copy around, and all weights in float64
    if cfg.compensation.propagate != "none":
        depth = len(inputs.blocks)
        streams = images * (3 * stream + depth * rates.tokens) * FLOAT  # on the host
        heads = max(block.sizes.heads for block in inputs.blocks)
        maps = (
            (depth + 3 * heads) * batch * rates.tokens**2 * FLOAT if cfg.compensation.token_weights == "rollout" else 0
        )
        stages["compensate"] = (streams, sums + left + model + max(hooked, maps))
    on_device = SCATTERED * max(used for _, used in stages.values()) / MIB
    if inputs.device.type == "cuda":
        host = rates.host_mib + max(kept for kept, _ in stages.values()) / MIB
        return {"host": host, "device": (rates.device_mib or 0.0) + on_device}
    return {"host": rates.host_mib + max(a + SCATTERED * b for a, b in stages.values()) / MIB, "device": None}


def statistics_bytes(inputs: Inputs) -> int:
    """The float64 sums that calibration keeps, of the groups that will be pruned."""
    total = 0
    for sizes in (block.sizes for block in inputs.blocks):
        total += sizes.mlp**2 if "mlp" in inputs.groups else 0
        total += 3 * sizes.heads * sizes.qk**2 if "qk" in inputs.groups else 0
        total += (sizes.heads * sizes.vo) ** 2 if inputs.groups & {"vo", "heads"} else 0
    return DOUBLE * total
