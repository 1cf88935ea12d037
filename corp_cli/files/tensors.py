"""Files of tensors: safetensors, whole or not at all; large sets of them in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from corp_cli.files.output import appearing, write_whole
from corp_cli.files.shards import INDEX, checkpoint_files, index_text, parts_of

SHARD_BYTES = 5 * 10**9  # of tensors in one file, as on the Hugging Face hub
FOR_OTHERS = ("format", "pt")  # the metadata without which other readers refuse a shard


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


def save_parts(tensors: dict[str, Tensor], path: Path, name: str, content: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write CPU `tensors` as `save_whole` does, or in shards of up to `shard_bytes` and an index with the metadata.

    What was at `path` is gone once the new one is whole, but that an index goes first: it must not name shards of two
    models. Of shards that cannot all be written none stays. Raises OSError or SafetensorError.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = f"{path.stem}{{suffix}}{path.suffix}"
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=pattern, max_shard_size=shard_bytes)
    old = {file for file in (path, *checkpoint_files(path)) if file.is_file()}
    new: list[Path] = []
    try:
        if split.is_sharded:
            path.with_name(path.name + INDEX).unlink(missing_ok=True)
            for shard, names in split.filename_to_tensors.items():
                save_whole({one: tensors[one] for one in names}, path.with_name(shard), *FOR_OTHERS)
                new.append(path.with_name(shard))
            index = {"metadata": {**split.metadata, name: content}, "weight_map": split.tensor_to_filename}
            write_whole(path.with_name(path.name + INDEX), lambda file: file.write(index_text(index)))
            new.append(path.with_name(path.name + INDEX))
        else:
            save_whole(tensors, path, name, content)
            new.append(path)
    except BaseException:
        for file in new:
            file.unlink(missing_ok=True)
        raise
    for file in old - set(new):
        file.unlink(missing_ok=True)


def stored(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one after the other. Raises OSError, ValueError or SafetensorError."""
    for part in parts_of(path):
        with safe_open(part, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
