"""What bad inputs are made of: photos, files and checkpoints, whole and broken, in the current folder."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_cli.cli.main import main as corp
from corp_cli.models.bundled import BUNDLED

WEIGHTS = BUNDLED["vit_digits"].weights
QUICK = ["device=cpu", "calibration.num_workers=0", "evaluation.num_workers=0", "calibration.num_images=32"]


def photos(count: int = 40, folder: str = "photos") -> None:
    """Gray images that the bundled model can take."""
    Path(folder).mkdir(parents=True)
    for i in range(count):
        Image.new("L", (8, 8), 5 * i).save(f"{folder}/{i:03}.png")


def corrupt_photos(bad: int) -> Callable[[], None]:
    """40 images, `bad` of which are cut off."""

    def prepare() -> None:
        photos()
        for path in sorted(Path("photos").iterdir())[:bad]:
            path.write_bytes(path.read_bytes()[:40])

    return prepare


def written(name: str, content: str | bytes) -> Callable[[], None]:
    """A file of this content."""

    def prepare() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def both(*steps: Callable[[], None]) -> Callable[[], None]:
    """One after the other."""

    def prepare() -> None:
        for step in steps:
            step()

    return prepare


def dense(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[], None]:
    """dense.safetensors: the weights of the model that stands for the bundled one, changed."""

    def prepare() -> None:
        state = load_file(BUNDLED["vit_digits"].weights)
        change(state)
        save_file(state, "dense.safetensors")

    return prepare


def fill(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Put `value` in every place of one tensor."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state[name].fill_(value)

    return change


def reshape(state: dict[str, torch.Tensor]) -> None:
    """One tensor of another shape, one missing, one too many."""
    state["head.weight"] = torch.zeros(7, 96)
    state["extra"] = torch.zeros(1)
    del state["norm.bias"]


def foreign() -> None:
    """The weights of something else."""
    save_file({"conv1.weight": torch.zeros(3, 3), "conv1.bias": torch.zeros(3)}, "dense.safetensors")


class Model:
    """A model saved whole, as code."""


@functools.cache
def pruned_bytes() -> bytes:
    """A pruned checkpoint."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert corp(["prune", *QUICK, "evaluation.throughput_batches=0", "hydra.run.dir=run"]) == 0
    whole = Path("run/pruned.safetensors").read_bytes()
    shutil.rmtree("run")
    return whole


def pruned(name: str = "pruned.safetensors", size: int | None = None) -> Callable[[], None]:
    """A pruned checkpoint, or its first bytes."""
    return lambda: written(name, pruned_bytes()[:size])()


def read_only() -> None:
    """A folder that nobody can write to."""
    Path("locked").mkdir(mode=0o500)
