"""Compensated blocks kept for a run that goes on: safetensors, and the sizes from which their modules are built."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from corp_cli.files.tensors import save_whole
from corp_cli.method.compensate import GroupError
from corp_cli.models.blocks import Block
from corp_cli.models.resize import pruned_sizes, resize, sizes_from_json
from corp_cli.models.spec import PrunedSizes

FORMAT = "corp-block"


@dataclass(frozen=True)
class BlockFiles:
    """Files of compensated blocks in a folder, named after what they depend on; see `method.sequential.Progress`."""

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
