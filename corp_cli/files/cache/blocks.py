"""Compensated blocks kept for a run that goes on: their tensors, and the sizes from which their modules are built."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from corp_cli.errors import CorpError
from corp_cli.files.cache.keys import key_sha256
from corp_cli.files.kept import Kept, Key, kept_of_block, write_kept
from corp_cli.linalg.fit import Fit
from corp_cli.method.compensate import GroupError
from corp_cli.method.keep import KeptAttention, KeptUnits
from corp_cli.method.sequential import Repaired
from corp_cli.models.blocks import Block
from corp_cli.models.resize import pruned_sizes, resize, sizes_from_json
from corp_cli.models.spec import PrunedSizes
from corp_cli.runtime import ranks

KIND = "repaired block and its units"
UNITS = "units that stay/"  # before the names of their indices, beside those of the block's tensors


def group_error(content: dict[str, Any]) -> GroupError:
    """What `asdict` made of it."""
    fits = (
        Fit(found["rounds"], tuple(found["ridges"]), *(tuple(found[part]) for part in ("fitted", "held_out")))
        for found in content["fits"]
    )
    return GroupError(content["before"], content["after"], tuple(fits))


def named_indices(units: KeptUnits) -> dict[str, Tensor]:
    """The indices in `units` by name; `units_of` takes them back."""
    found = {} if units.mlp is None else {"mlp": units.mlp}
    return found | (vars(units.attn) if units.attn else {})


def units_of(indices: dict[str, Tensor]) -> KeptUnits:
    """What `named_indices` was given."""
    attn = {name: index for name, index in indices.items() if name != "mlp"}
    return KeptUnits(indices.get("mlp"), KeptAttention(**attn) if attn else None)


@dataclass(frozen=True)
class BlockFiles:
    """Files of compensated blocks in a folder, under what they depend on; see `method.sequential.Progress`."""

    folder: Path
    key: Key

    def path(self, index: int) -> Path:
        """The file of one block."""
        return self.folder / f"block-{index:03}-{key_sha256(self.key)[:16]}.safetensors"

    def write(self, index: int, block: Block, pruned: nn.Module, dense: nn.Module, found: Repaired) -> None:
        """Keep a block of `pruned`; the file appears only when whole."""
        units, errors = found
        sizes = pruned_sizes(pruned, dense).get(block.name, PrunedSizes())
        content = {
            "block": block.name,
            "sizes": asdict(sizes),
            "errors": {group: asdict(error) for group, error in errors.items()},
        }
        state = pruned.get_submodule(block.name).state_dict()
        state |= {f"{UNITS}{name}": index for name, index in named_indices(units).items()}
        with contextlib.suppress(CorpError):  # the run can do without it
            ranks.once(write_kept, self.path(index), KIND, Kept(self.key, content, state))

    def read(self, index: int, block: Block, pruned: nn.Module) -> Repaired | None:
        """Put a kept block into `pruned` and give what came of it; None where none is kept, or not this one."""
        instead = f"{block.name} is repaired anew"
        kept = ranks.once(kept_of_block, self.path(index), KIND, self.key, block.name, instead)
        if kept is None:
            return None
        resize(pruned, {block.name: sizes_from_json(kept.content["sizes"])})
        indices = {name.removeprefix(UNITS): t for name, t in kept.tensors.items() if name.startswith(UNITS)}
        state = {name: tensor for name, tensor in kept.tensors.items() if not name.startswith(UNITS)}
        pruned.get_submodule(block.name).load_state_dict(state)
        errors = {group: group_error(error) for group, error in kept.content["errors"].items()}
        return units_of(indices), errors
