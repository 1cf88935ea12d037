"""Reading, choosing and labelling images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from corp_cli.data import ImageSet, batches, choose, read_images, resolve_device, with_labels
from corp_cli.errors import CorpError
from corp_cli.models.preprocess import eval_transform, wordnet_classes

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


def test_nested_and_flat_folders_are_read(tmp_path: Path) -> None:
    folder(tmp_path, a=2, b=1)
    (tmp_path / "a" / "deep").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "a" / "deep" / "x.JPEG")
    Image.new("RGB", (8, 8)).save(tmp_path / "top.webp")
    (tmp_path / "notes.txt").write_text("not an image")
    found = read_images(tmp_path, "calibration.path")
    assert sorted(found.folders) == [".", "a", "a", "a/deep", "b"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: p / "nowhere", "does not exist"),
        (lambda p: p, "holds no images"),
        (lambda p: ((p / "f.txt").write_text("") and None) or p / "f.txt", "is a file"),
    ],
)
def test_places_without_images_are_refused_naming_the_key(tmp_path: Path, make, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CorpError, match=rf"calibration\.path=.*{sentence}"):
        read_images(make(tmp_path), "calibration.path")


def test_tensors_with_labels_are_read(tmp_path: Path) -> None:
    path = tmp_path / "images.safetensors"
    save_file({"images": torch.zeros(3, 8, 8, dtype=torch.uint8), "labels": torch.tensor([2, 0, 1])}, path)
    found = read_images(path, "calibration.path")
    assert (len(found), found.labels) == (3, (2, 0, 1))
    save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(CorpError, match="does not hold a tensor named images"):
        read_images(path, "calibration.path")


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


def test_wordnet_folders_get_their_imagenet_index() -> None:
    labelled = with_labels(image_set("n02102040", "train/n01440764", "n02102040"), 1000, wordnet_classes(1000))
    assert labelled.labels == (217, 0, 217)


def test_as_many_folders_as_classes_are_the_classes_in_order() -> None:
    assert with_labels(image_set("cat", "ant", "bee"), 3, {}).labels == (2, 0, 1)
    assert with_labels(image_set("cat", "ant"), 3, {}).labels is None
    assert with_labels(image_set("x", labels=(5,)), 3, {}).labels == (5,)


def test_batches_are_preprocessed_in_order(tmp_path: Path) -> None:
    images = with_labels(read_images(folder(tmp_path, a=3, b=2), "calibration.path"), 2, {})
    found = list(batches(images, eval_transform(DATA), 2, 0))
    assert [tuple(x.shape) for x, _ in found] == [(2, 3, 16, 16), (2, 3, 16, 16), (1, 3, 16, 16)]
    assert torch.cat([y for _, y in found]).tolist() == [0, 0, 0, 1, 1]
    assert found[0][0].min() >= -1
    assert found[0][0].max() <= 1


def test_workers_give_the_same_batches(tmp_path: Path) -> None:
    images = read_images(folder(tmp_path, a=5), "calibration.path")
    alone, helped = (list(batches(images, eval_transform(DATA), 2, workers)) for workers in (0, 2))
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(alone, helped, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named(tmp_path: Path, workers: int) -> None:
    folder(tmp_path, a=2)
    (tmp_path / "a" / "1.png").write_bytes(b"not a png")
    with pytest.raises(CorpError, match=r"^[^\n]*1\.png cannot be read as an image[^\n]*$"):
        list(batches(read_images(tmp_path, "calibration.path"), eval_transform(DATA), 1, workers))


def test_devices() -> None:
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(CorpError, match="device=gpu is not a device"):
        resolve_device("gpu")
    with pytest.raises(CorpError, match="device=cuda:99 is not available"):
        resolve_device("cuda:99")
