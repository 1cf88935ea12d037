"""What an interrupted run leaves for `corp prune resume=FOLDER`: statistics, damage curves, and the blocks repaired."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from corp_cli.config.prune import PruneConfig
from corp_cli.files.cache.measured import statistics_key
from corp_cli.files.tensors import save_whole
from corp_cli.method.compensate import GroupError
from corp_cli.models.blocks import Block
from corp_cli.models.resize import PrunedSizes, pruned_sizes, resize, sizes_from_json
from corp_cli.prepare import Inputs
from corp_cli.sizes.plan import SizePlan

FORMAT = "corp-block"


@dataclass(frozen=True)
class Progress:
    """The folder of files with repaired blocks, and what they depend on."""

    folder: Path
    key: str

    def path(self, index: int) -> Path:
        """The file of one block."""
        return self.folder / f"block-{index:03}-{self.key[:16]}.safetensors"

    def write(
        self, index: int, block: Block, pruned: nn.Module, dense: nn.Module, errors: dict[str, GroupError]
    ) -> None:
        """Keep a block of `pruned`; the file appears only when whole."""
        sizes = pruned_sizes(pruned, dense).get(block.name, PrunedSizes())
        content = {"sizes": asdict(sizes), "errors": {group: asdict(error) for group, error in errors.items()}}
        tensors = {k: v.cpu().contiguous() for k, v in pruned.get_submodule(block.name).state_dict().items()}
        with contextlib.suppress(OSError, SafetensorError):  # the run can do without it
            save_whole(tensors, self.path(index), FORMAT, json.dumps(content))

    def read(self, index: int, block: Block, pruned: nn.Module) -> dict[str, GroupError] | None:
        """Put a kept block into `pruned` and give its errors; None where none is kept."""
        try:
            with safe_open(self.path(index), framework="pt") as file:
                content = json.loads((file.metadata() or {})[FORMAT])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, ValueError):
            return None
        resize(pruned, {block.name: sizes_from_json(content["sizes"])})
        pruned.get_submodule(block.name).load_state_dict(state)
        return {group: GroupError(**error) for group, error in content["errors"].items()}


def make_progress(folder: Path | None, inputs: Inputs, cfg: PruneConfig, plan: SizePlan) -> Progress | None:
    """Where repaired blocks of this run are kept, under a key of all that they depend on; None without a folder."""
    if folder is None:
        return None
    parts = {
        "statistics": statistics_key(inputs),
        "ranker": asdict(cfg.ranker),
        "compensation": asdict(cfg.compensation),
        "seed": cfg.seed,
        "sizes": [asdict(each) for each in plan.sizes],
        "merge": plan.merge,
    }
    return Progress(folder, hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())


def has_room(folder: Path, blocks: tuple[Block, ...]) -> bool:
    """Whether the disk takes twice what the statistics of `blocks` take: a run that has no room goes on without."""
    widths = [(b.sizes.mlp, b.sizes.heads * b.sizes.vo, b.sizes.heads * b.sizes.qk) for b in blocks]
    needed = 8 * sum(mlp**2 + vo**2 + 3 * qk**2 for mlp, vo, qk in widths)
    existing = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    return shutil.disk_usage(existing).free > 2 * needed
