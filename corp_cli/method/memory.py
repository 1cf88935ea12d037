"""What a run holds in memory, in bytes, by shapes alone; and how it goes about where the device has less.

Counted are the tensors that are alive together where each stage needs most; allocators take more, see `SCATTERED`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from corp_cli.config.images import BATCH, CalibrationConfig
from corp_cli.config.prune import CompensationConfig, SparsityConfig
from corp_cli.errors import CorpError
from corp_cli.linalg.gauss_newton import STEPS, chunk
from corp_cli.models.adapter import block_names
from corp_cli.models.attention.maps import MAPS
from corp_cli.models.blocks import Block
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.loading import parameters
from corp_cli.models.offload import HOST, keep_on_host
from corp_cli.models.streams import cannot_walk, tokens
from corp_cli.runtime import console, ranks
from corp_cli.runtime.memory import free_host_memory, free_memory

FLOAT, DOUBLE = 4, 8
SCATTERED = 1.2  # memory that allocators take, for what is in use
TWICE = 2  # a copy of the rows at hand
BUSY = 3 * 2**27  # bytes of what goes into fc2, of a batch that keeps a GPU busy
MOST_DECODED = 2**31  # of decoded calibration images, some 14000 at 224 x 224; more are decoded anew for every pass


@dataclass(frozen=True)
class Load:
    """What the memory of a run follows from; tokens, width and pixels are those of one image at the first block."""

    blocks: tuple[Block, ...]
    groups: frozenset[str]  # those to prune
    parameters: int  # of the dense model
    of_block: int  # of its largest block
    bytes_each: int  # of a parameter on the host
    images: int
    kept: float  # share of the hidden channels that stays
    tokens: int
    width: int
    pixels: int
    prepared: bool = False  # images that the caller holds anyway
    device: torch.device = HOST

    @property
    def decoded(self) -> int:
        """Bytes of the host that decoded images take for passes to come; none, where they would take too many."""
        every = self.images * self.pixels
        return 0 if self.prepared or every > MOST_DECODED else every

    def maps(self, how: CompensationConfig, batch: int) -> int:
        """The attention of all blocks to a batch, by which tokens are weighted, and that of one, worked out."""
        of_all = len(self.blocks) * batch * self.tokens**2 * FLOAT
        return of_all + self.attended(batch) if how.token_weights == "rollout" else 0

    def attended(self, batch: int) -> int:
        """The attention of one block to a batch, worked out: of as many images as go together."""
        of_image = max(block.sizes.heads for block in self.blocks) * self.tokens**2
        return 3 * max(of_image, min(MAPS, batch * of_image)) * FLOAT

    def weighed(self, how: CompensationConfig, batch: int) -> int:
        """What weighing logits by attention takes."""
        return self.attended(batch) if how.weighs_logits and "qk" in self.groups else 0


@dataclass(frozen=True)
class Need:
    """Bytes on the host and on the device; on the CPU, both are of the host."""

    host: float
    device: float


@torch.inference_mode()
def load_of(
    dense: LoadedModel,
    groups: frozenset[str],
    images: int,
    sparsity: SparsityConfig,
    prepared: bool = False,
    device: torch.device = HOST,
) -> Load:
    """That of a run that prunes `groups` of `dense` by so many images on `device`."""
    of_block = max(parameters(dense.model.get_submodule(block.name)) for block in dense.blocks)
    first, size = next(dense.model.parameters()), dense.spec.data["input_size"]
    try:
        stream = tokens(dense.model, torch.zeros(1, *size, device=first.device, dtype=first.dtype))
    except CorpError:  # of a size that only the walk along the stream would mind
        stream = torch.zeros(1, 1, first.shape[-1])
    budget, each = sparsity.budget(), first.element_size()
    cut = sparsity.fractions()["mlp"] or (getattr(sparsity, budget) if budget else 0.0)
    counted = stream.numel() // stream.shape[-1], stream.shape[-1], torch.Size(size).numel()
    whole = parameters(dense.model)
    return Load(dense.blocks, groups, whole, of_block, each, images, 1 - cut, *counted, prepared, device)


def statistics_bytes(load: Load, blocks: tuple[Block, ...]) -> int:
    """The float64 sums that calibration keeps of `blocks`, of the groups that will be pruned."""
    total = 0
    for sizes in (block.sizes for block in blocks):
        total += sizes.mlp**2 if "mlp" in load.groups else 0
        total += 5 * sizes.heads * sizes.qk**2 if "qk" in load.groups else 0
        total += (sizes.heads * sizes.vo) ** 2 if load.groups & {"vo", "heads"} else 0
    return DOUBLE * total


def activations(load: Load, batch: int) -> int:
    """What one block makes of a batch, with what statistics copy of it."""
    hidden = max(block.sizes.mlp for block in load.blocks)
    of_image = 3 * load.pixels + load.tokens * (5 * hidden + 9 * load.width)
    return batch * of_image * FLOAT


def fitted_tokens(load: Load, how: CompensationConfig) -> int:
    """How many tokens a layer is refitted to."""
    return min(how.fit_tokens, load.images * load.tokens)


def head_group(load: Load) -> int:
    """How many heads have their values refitted together; see `fit_values.groups_of`."""
    sizes = max((block.sizes for block in load.blocks), key=lambda sizes: sizes.heads)
    return min(sizes.heads, max(1, (sizes.mlp or 4 * load.width) // load.width))


def working_set(load: Load, how: CompensationConfig, batch: int) -> float:
    """What the repair of one block holds beside its float32 weights, where it needs most."""
    hidden = max(block.sizes.mlp for block in load.blocks)
    outputs = max(block.sizes.heads * block.sizes.vo for block in load.blocks)
    seen = activations(load, batch)

    def solved(inputs: int) -> float:
        """The moments of a layer's inputs and outputs while they are summed up, or solved with."""
        matrix = (inputs + load.width) ** 2 * DOUBLE
        return max(2 * matrix + TWICE * seen, 3 * matrix + 4 * inputs**2 * DOUBLE)

    stages = [solved(outputs), seen + load.maps(how, batch), seen + load.weighed(how, batch)]
    if "mlp" in load.groups:
        fits_kept = how.propagate == "none" and how.mlp == "gauss_newton"
        stages.append(solved(round(load.kept * hidden) if fits_kept else hidden))
        if how.mlp == "gauss_newton":
            count, units = fitted_tokens(load, how), 2 * load.kept * hidden  # with a gate; without one, half of that
            at_once = min(count, chunk(max(1, int(load.kept * hidden)), load.device))
            rows = count * (7 * load.width + units) + 4 * units * at_once
            stages.append((rows + (STEPS + 4) * units * load.width) * FLOAT)
    if "vo" in load.groups and how.vo == "reduced_rank":
        gathered = head_group(load) * load.width
        stages.append(6 * (gathered + load.width) ** 2 * DOUBLE + 3 * batch * load.tokens * gathered * FLOAT)
    return load.of_block * DOUBLE + max(stages)


def needs(load: Load, how: CompensationConfig, cfg: CalibrationConfig) -> dict[str, Need]:
    """By stage, with everything that is there all along, but for decoded images, which stay on the host."""
    batch, depth = min(cfg.batch, load.images), len(load.blocks)
    sums, largest = (statistics_bytes(load, blocks) for blocks in (load.blocks, load.blocks[:1]))
    sequential, refits = how.propagate != "none", how.refits
    seen, stream = activations(load, batch), load.images * load.tokens * load.width * FLOAT
    measured = seen + load.weighed(how, batch) + (load.maps(how, batch) if refits and not sequential else 0)
    streams = 0 if cfg.scratch else stream
    kept = streams * (4 if sequential else 3 if refits else 0)  # dense and pruned, and targets of both halves
    repair = working_set(load, how, batch) if sequential or refits else load.of_block * DOUBLE + TWICE * largest
    if cfg.offload == "blocks":
        one, rest = load.parameters * load.bytes_each, load.parameters - depth * load.of_block
        at_hand = (3 * rest + 2 * load.of_block) * FLOAT
        return {
            "calibrate": Need(one + sums + streams, at_hand + TWICE * largest + measured),
            "compensate": Need(3 * one + sums + kept, at_hand + repair),
            "evaluate": Need(3 * one + sums, at_hand + seen),
        }
    one = load.parameters * FLOAT
    return {
        "calibrate": Need(0, one + TWICE * sums + measured),
        "compensate": Need(kept, 3 * one + sums + repair),
        "evaluate": Need(0, 3 * one + sums + seen),
    }


def most(found: dict[str, Need]) -> Need:
    """What the stage takes that needs most of each."""
    return Need(*(SCATTERED * max(getattr(need, part) for need in found.values()) for part in ("host", "device")))


def filling(load: Load) -> int:
    """How many images of a batch fill a GPU: with fewer it waits for Python, with more there is only less room."""
    of_image = load.tokens * max(block.sizes.mlp or load.width for block in load.blocks) * FLOAT
    return max(BATCH, min(BUSY // of_image, 8 * BATCH) // 16 * 16)


def settle(
    load: Load, dense: LoadedModel, how: CompensationConfig, cfg: CalibrationConfig, device: torch.device
) -> CalibrationConfig:
    """`cfg` with offload=none or blocks, and batches of a size for which there is room. Warns where there is none.

    Raises CorpError for a model whose blocks cannot be walked through and are to come one at a time.
    """
    why, free = cannot_walk(dense.model), free_memory(device)
    if why and cfg.offload == "blocks":
        raise CorpError(f"calibration.offload=blocks walks from block to block, and {why}; set it to none.")
    if ranks.count() > 1 and cfg.offload == "blocks":
        raise CorpError("calibration.offload=blocks is for one process; set it to none, or start corp by itself.")
    if free is None:
        cfg = replace(cfg, offload="none" if cfg.offload == "auto" else cfg.offload, batch_size=cfg.batch)
        warn_of_host(load, most(needs(load, how, cfg)), cfg, shared=True)
        return cfg

    def needed(offload: str, batch: int) -> float:
        return most(needs(load, how, replace(cfg, offload=offload, batch_size=batch))).device

    offload = cfg.offload
    if offload == "auto":
        alone = ranks.count() == 1
        offload = "none" if why or not alone or needed("none", 1) <= free else "blocks"
        if offload == "blocks":
            console.warn("the model and what its repair needs do not fit the device: calibration.offload=blocks.")
    wanted = cfg.batch_size or (filling(load) if offload == "none" else cfg.batch)
    batch = wanted
    while batch > 1 and needed(offload, batch) > free:
        batch //= 2
    if needed(offload, batch) > free:
        console.warn(
            f"the run may need {needed(offload, 1) / 2**30:.1f} GiB of device memory and {free / 2**30:.1f} are free; "
            "if it runs out, lower compensation.fit_tokens or set calibration.offload=blocks."
        )
        batch = cfg.batch
    elif batch < (cfg.batch_size or 0):
        console.warn(f"calibration.batch_size={cfg.batch_size} would not fit the device; going on with {batch}.")
    cfg = replace(cfg, offload=offload, batch_size=batch)
    if not has_room_for_streams(load, how, cfg, device):
        warn_of_host(load, most(needs(load, how, cfg)), cfg, shared=False)
    return cfg


def has_room_for_streams(load: Load, how: CompensationConfig, cfg: CalibrationConfig, device: torch.device) -> bool:
    """Whether the tokens of all images may wait on `device`, beside what the run needs there anyway."""
    free, need = free_memory(device), most(needs(load, how, cfg))
    return free is not None and cfg.offload == "none" and need.device + need.host <= free


def warn_of_host(load: Load, need: Need, cfg: CalibrationConfig, shared: bool) -> None:
    """Say so where the host has less than the run needs beside the model, which is there; shared: with the device."""
    free = free_host_memory()
    needed = need.host + load.decoded + (need.device if shared else 0) - load.parameters * load.bytes_each
    if free is not None and needed > free:
        advice = "use fewer images" if cfg.scratch else "set calibration.scratch=FOLDER, or use fewer images"
        console.warn(
            f"the run may need {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} are available; "
            f"{advice} if it runs out."
        )


def bring(models: Collection[nn.Module], device: torch.device) -> None:
    """Put all models on `device`, or where it has no room for them their blocks, one at a time while they run."""
    free, needed = free_memory(device), SCATTERED * FLOAT * sum(map(parameters, models))
    for model in models:
        if free is not None and needed > free and block_names(model):
            keep_on_host(model, device)
        else:
            model.to(device)


def place(dense: LoadedModel, cfg: CalibrationConfig, device: torch.device) -> None:
    """Put the model where `cfg` wants it."""
    if cfg.offload == "blocks":
        keep_on_host(dense.model, device)
    else:
        dense.model.to(device)
