"""Choosing and batching images, and what becomes of broken ones."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from corp_cli.errors import CorpError
from corp_cli.images.batches import Intake, batches, choose, require_good, resolve_device, stacked
from corp_cli.images.sources import ImageSet, read_images
from corp_cli.models.preprocess import eval_transform
from corp_cli.runtime import console

DATA = {
    "input_size": [3, 16, 16],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def folder(tmp_path: Path, **counts: int) -> Path:
    for name, count in counts.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.new("RGB", (20, 24), (i * 10 % 255, 0, 0)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def image_set(*folders: str, labels: tuple[int, ...] | None = None) -> ImageSet:
    return ImageSet("test", tuple(Path(f"{name}/{i}.png") for i, name in enumerate(folders)), folders, labels)


@settings(deadline=None)
@given(
    folders=st.lists(st.sampled_from("abcd"), min_size=1, max_size=40),
    count=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_choice_is_seeded_spread_and_without_loss(folders: list[str], count: int, seed: int) -> None:
    images = image_set(*folders)
    chosen, rest = choose(images, count, seed)
    assert choose(images, count, seed)[0] == chosen
    assert len(chosen) == min(count, len(folders))
    assert set(chosen.items) | set(rest.items) == set(images.items)
    assert len(chosen) + len(rest) == len(images)
    per_folder = {name: chosen.folders.count(name) for name in set(folders)}
    not_emptied = [n for name, n in per_folder.items() if n < folders.count(name)]
    if not_emptied:  # a folder with images left was not passed over in favour of another
        assert max(per_folder.values()) - min(not_emptied) <= 1


def test_another_seed_chooses_other_images() -> None:
    images = image_set(*"a" * 50)
    assert choose(images, 10, 0)[0] != choose(images, 10, 1)[0]


def test_batches_are_preprocessed_in_order(tmp_path: Path) -> None:
    images = replace(read_images(folder(tmp_path, a=3, b=2), "calibration.path"), labels=(0, 0, 0, 1, 1))
    found = list(batches(images, eval_transform(DATA), 2, 0))
    assert [tuple(x.shape) for x, _ in found] == [(2, 3, 16, 16), (2, 3, 16, 16), (1, 3, 16, 16)]
    assert torch.cat([y for _, y in found]).tolist() == [0, 0, 0, 1, 1]
    assert found[0][0].min() >= -1
    assert found[0][0].max() <= 1


def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    images = read_images(folder(tmp_path, a=5), "calibration.path")
    alone, helped = (list(batches(images, eval_transform(DATA), 2, workers)) for workers in (0, 2))
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(alone, helped, strict=True))


BAD = {
    "not an image": b"not a png",
    "empty": b"",
    "truncated": None,  # cut below
}


def with_bad(tmp_path: Path, good: int, kind: str = "not an image") -> Path:
    """`good` sound images, and bad.png."""
    folder(tmp_path, a=good)
    content = BAD[kind]
    if content is None:
        noise = torch.randint(0, 255, (64, 64, 3), dtype=torch.uint8).numpy()
        Image.fromarray(noise).save(tmp_path / "whole.png")
        content = (tmp_path / "whole.png").read_bytes()[:6000]
        (tmp_path / "whole.png").unlink()
    (tmp_path / "a" / "bad.png").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", list(BAD))
def test_an_unreadable_image_is_left_out_and_named(tmp_path: Path, workers: int, kind: str) -> None:
    images = read_images(with_bad(tmp_path, 5, kind), "calibration.path")
    intake = Intake("calibration.path=x", "calibration.max_bad", allowed=1)
    found = list(batches(images, eval_transform(DATA), 2, workers, intake=intake))
    assert sum(len(x) for x, _ in found) == intake.good == 5
    assert len(intake.bad) == 1
    assert "bad.png (" in intake.bad[0]
    assert "\n" not in intake.bad[0]


def test_too_many_unreadable_images_are_refused(tmp_path: Path) -> None:
    images = read_images(with_bad(tmp_path, 2), "calibration.path")
    intake = Intake("calibration.path=x", "calibration.max_bad", allowed=0)
    with pytest.raises(CorpError, match=r"1 of the first 3, first .*bad\.png.*calibration\.max_bad"):
        list(batches(images, eval_transform(DATA), 3, 0, intake=intake))
    with pytest.raises(CorpError, match=r"bad\.png .* cannot be read as an image"):
        list(batches(images, eval_transform(DATA), 3, 0))


# --- images that are not what they seem -------------------------------------------------------------------------


def strip(path: Path) -> None:
    Image.new("1", (60000, 1)).save(path)


def bomb(path: Path) -> None:
    Image.new("1", (20000, 20000)).save(path)


def ghostscript(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a regular file"),
        (strip, "60000x1 pixels: over"),
        (bomb, "exceeds limit"),
        (ghostscript, "cannot identify image file"),
    ],
)
def test_what_would_hang_or_explode_is_left_out(tmp_path: Path, make: Callable[[Path], None], why: str) -> None:
    make(folder(tmp_path, a=3) / "a" / "9.png")
    intake = Intake("calibration.path=x", "calibration.max_bad", allowed=1)
    found = list(batches(read_images(tmp_path, "x"), eval_transform(DATA), 2, 2, intake=intake))
    assert sum(len(x) for x, _ in found) == 3
    assert re.search(rf"9\.png \(.*{why}", intake.bad[0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemError("x"), RuntimeError("a hook"), StopIteration()])
def test_an_image_whose_transform_fails_is_left_out(tmp_path: Path, workers: int, error: Exception) -> None:
    transform = eval_transform(DATA)

    def fails(image: Image.Image) -> Tensor:
        if image.getpixel((0, 0)) == (10, 0, 0):
            raise error
        return transform(image)

    intake = Intake("calibration.path=x", "calibration.max_bad", allowed=1)
    list(batches(read_images(folder(tmp_path, a=3), "x"), fails, 2, workers, intake=intake))
    assert intake.good == 2
    assert "1.png (" in intake.bad[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_that_runs_out_is_the_fault_of_a_giant_alone(tmp_path: Path, workers: int) -> None:
    def fails(image: Image.Image) -> Tensor:
        raise MemoryError

    Image.new("1", (6000, 6000)).save(tmp_path / "giant.png")
    intake = Intake("calibration.path=x", "calibration.max_bad", allowed=1)
    assert list(batches(read_images(tmp_path, "x"), fails, 2, workers, intake=intake)) == []
    assert "giant.png (MemoryError)" in intake.bad[0]
    with pytest.raises(MemoryError):  # smaller batches may help
        list(batches(read_images(folder(tmp_path / "small", a=3), "x"), fails, 2, workers, intake=intake))


def test_images_that_are_nearly_black_are_said(tmp_path: Path) -> None:
    for i in range(3):
        Image.fromarray(np.full((9, 9), 4000, np.uint16)).save(tmp_path / f"{i}.png")
    intake, said = Intake("calibration.path=x", "", 0), console.collect_warnings()
    list(batches(read_images(tmp_path, "x"), eval_transform(DATA), 2, 0, intake=intake))
    require_good(intake)
    assert "3 of 3 images of calibration.path=x have 16 bits, look nearly black" in said[0]


# --- threads ----------------------------------------------------------------------------------------------------


def test_a_read_that_never_ends_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transform, end = eval_transform(DATA), threading.Event()
    monkeypatch.setattr("corp_cli.images.batches.SILENCE", 0.2)

    def waits(image: Image.Image) -> Tensor:
        if image.getpixel((0, 0)) == (20, 0, 0):
            end.wait()
        return transform(image)

    with pytest.raises(CorpError, match=r"Reading .*2\.png has taken .* check the disk"):
        list(batches(read_images(folder(tmp_path, a=9), "x"), waits, 2, 2))
    end.set()


def test_no_shared_memory_and_no_process_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have 64 MB of shared memory, and a process in it waits for ever for more."""

    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("multiprocessing.process.BaseProcess.start", "torch.UntypedStorage._new_shared", "os.fork"):
        monkeypatch.setattr(name, none_left)
    assert len(list(batches(read_images(folder(tmp_path, a=9), "x"), eval_transform(DATA), 2, 4))) == 5


def test_threads_end_with_their_batches_and_stay_few_images_ahead(tmp_path: Path) -> None:
    transform, read, before = eval_transform(DATA), list[int](), threading.active_count()

    def counted(image: Image.Image) -> Tensor:
        read.append(1)
        return transform(image)

    found = batches(read_images(folder(tmp_path, a=60), "x"), counted, 2, 2)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert len(read) <= 2 + 2 * (2 + 2)


def test_several_right_classes_come_as_rows(tmp_path: Path) -> None:
    images = replace(read_images(folder(tmp_path, a=2), "x"), labels=((1, 2), (3, -1)))
    (_, labels), *_ = batches(images, eval_transform(DATA), 2, 0)
    assert labels.tolist() == [[1, 2], [3, -1]]


def test_devices() -> None:
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(CorpError, match="device=gpu is not a device"):
        resolve_device("gpu")
    with pytest.raises(CorpError, match="device=cuda:99 is not available"):
        resolve_device("cuda:99")


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 4, 4), (3, 1, 1)])
def test_images_are_put_together_in_the_order_in_memory_that_they_have(shape: tuple[int, ...]) -> None:
    images = [torch.randint(255, shape, generator=torch.Generator().manual_seed(i)).byte() for i in range(4)]
    decoded = [image.permute(1, 2, 0).contiguous().permute(2, 0, 1) for image in images]
    for each in (images, decoded, [*images[:2], *decoded[2:]]):
        assert torch.equal(stacked(each), torch.stack(images))
    if shape[0] > 1 and shape[1] > 1:
        assert stacked(decoded).is_contiguous(memory_format=torch.channels_last)
