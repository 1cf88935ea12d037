"""Trajectory losses kept block by block, for a run that goes on and for others with the same images."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from corp_cli.errors import CorpError
from corp_cli.files.cache.keys import key_sha256
from corp_cli.files.kept import Kept, Key, kept_of_block, write_kept
from corp_cli.method.optin import Losses

KIND = "trajectory losses"


@dataclass(frozen=True)
class LossFiles:
    """Files of the losses of blocks in a folder, under what they depend on; see `method.optin.Progress`."""

    folder: Path
    key: Key

    def path(self, index: int) -> Path:
        """The file of one block."""
        return self.folder / f"trajectory-{index:03}-{key_sha256(self.key)[:16]}.safetensors"

    def write(self, index: int, losses: Losses) -> None:
        """Keep those of a block; the file appears only when whole."""
        with contextlib.suppress(CorpError):  # the run can do without it
            write_kept(self.path(index), KIND, Kept(self.key, {"block": index}, losses))

    def read(self, index: int) -> Losses | None:
        """Those of a block; None where none are kept, or not these."""
        kept = kept_of_block(self.path(index), KIND, self.key, index, "its units are masked anew")
        return None if kept is None else kept.tensors
