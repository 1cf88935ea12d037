"""Files of tensors: safetensors, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from corp_cli.files.output import appearing


def save_whole(tensors: dict[str, Tensor], path: Path, name: str, content: str) -> None:
    """Write contiguous CPU `tensors` to `path`, which appears only when whole, with metadata `name`: `content`.

    One entry only: safetensors writes several in an order that differs from process to process. Raises OSError or
    SafetensorError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with appearing(path) as partial:
        partial.touch()  # with the user's umask; safetensors alone makes files that only their owner can read
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata={name: content})
        partial.chmod(mode)
