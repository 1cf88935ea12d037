"""Where images come from: folders, lists, tensors, timm's datasets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from corp_cli.cli.main import at_home
from corp_cli.config.images import CalibrationConfig
from corp_cli.errors import CorpError
from corp_cli.images.batches import batches
from corp_cli.images.decode import EXTENSIONS, from_tensor
from corp_cli.images.sources import ImageSet, is_timm_name, read_images
from corp_cli.models.datasets import read_dataset
from corp_cli.models.preprocess import eval_transform
from corp_cli.prepare.images import find_images
from corp_cli.runtime import console


def picture(path: Path, colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 24), (colour, 0, 0)).save(path)
    return path


# --- several --------------------------------------------------------------------------------------------------


def test_several_sources_are_one_set(tmp_path: Path) -> None:
    for name in ("a/ant/0.png", "a/bee/1.png", "b/ant/2.png"):
        picture(tmp_path / name)
    (tmp_path / "list.txt").write_text("a/ant/0.png\n")
    found = find_images(CalibrationConfig(), [str(tmp_path / one) for one in ("a", "b", "list.txt")], "key", None)
    assert [path.name for path in found.items if isinstance(path, Path)] == ["0.png", "1.png", "2.png", "0.png"]
    assert found.folders[:3] == ("ant", "bee", "ant")


@pytest.mark.parametrize("value", [[], [1], 3, ""])
def test_what_is_no_path_is_refused(value: Any) -> None:
    with pytest.raises(CorpError, match=r"calibration\.path=.* is not a path"):
        CalibrationConfig(path=value)


# --- folders --------------------------------------------------------------------------------------------------


def test_nested_flat_and_mixed_folders_are_read_in_every_format(tmp_path: Path) -> None:
    for name in ("top.webp", "a/0.jpg", "a/1.JPEG", "a/deep/x.png", "b/2.bmp", "b/3.tiff", "b/4.TIF", "b/._5.jpg"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    found = read_images(tmp_path, "calibration.path")
    assert found.folders == ("a", "a", "a/deep", "b", "b", "b", ".")
    assert not any(str(item).endswith("._5.jpg") for item in found.items)


def test_what_pillow_reads_is_read_and_other_types_are_said(tmp_path: Path) -> None:
    for name in ("0.gif", "1.ppm", "2.jp2", "3.jfif", "4.avif")[: 4 + (".avif" in EXTENSIONS)]:
        picture(tmp_path / name)
    for name in ("0.pdf", "0.eps", "a/0.mp4", "a/1.mp4", ".hidden"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said = console.collect_warnings()
    found = read_images(tmp_path, "x")
    assert len(next(batches(found, eval_transform(DATA), 99, 0))[0]) == len(found) >= 4
    assert [set(re.findall(r"\d \.\w+", warning)) for warning in said] == [{"2 .mp4", "1 .pdf", "1 .eps"}]
    assert said[0].endswith("which are left out.")
    for file in found.items:
        file.unlink()  # type: ignore[union-attr]
    with pytest.raises(CorpError, match=r"holds no images .* but 4 files of other types \(2 \.mp4"):
        read_images(tmp_path, "x")


@pytest.mark.parametrize("name", ["list.txt", "images.npy", "images.pt"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CorpError, match=rf"x=.*{name} is not a regular file"):
        read_images(tmp_path / name, "x")
    os.mkfifo(tmp_path / "0.png")
    (tmp_path / "list.csv").write_text("0.png\n")
    with pytest.raises(CorpError, match=r"names 1 files that do not exist"):
        read_images(tmp_path / "list.csv", "x")


def test_a_pattern_stands_for_folders(tmp_path: Path) -> None:
    for name in ("p/a/train/0.png", "p/b/train/x/1.png", "p/a/val/2.png", "p/train/3.png"):
        picture(tmp_path / name)
    found = read_images(tmp_path / "p" / "*" / "train", "x")
    assert found.folders == ("a/train", "b/train/x")
    assert found.source == str(tmp_path / "p")
    with pytest.raises(CorpError, match=r"does not exist"):
        read_images(tmp_path / "p" / "*" / "test", "x")


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "0.png")
    data = tmp_path / "data"
    data.mkdir()
    (data / "n01440764").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (data / "loop").symlink_to(data, target_is_directory=True)
    assert read_images(data, "x").folders == ("n01440764",)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    picture(tmp_path / "photos" / "0.png")
    assert len(read_images("~/photos", "calibration.path")) == 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: p / "nowhere", "does not exist; give a folder"),
        (lambda p: p, "holds no images"),
        (lambda p: picture(p / "one.png"), "is one image; give the folder"),
        (lambda p: ((p / "f.mp4").write_text("") and None) or p / "f.mp4", "a file of another kind"),
    ],
)
def test_places_without_images_are_refused_naming_the_key(
    tmp_path: Path, make: Callable[[Path], Path], sentence: str
) -> None:
    with pytest.raises(CorpError, match=rf"^calibration\.path=[^\n]*{sentence}"):
        read_images(make(tmp_path), "calibration.path")


def test_a_folder_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*_: object, onerror: Callable[[OSError], None], **__: object) -> list[object]:
        onerror(PermissionError(13, "Permission denied", "x/locked"))  # tests may run as root, whom no mode stops
        return []

    monkeypatch.setattr("corp_cli.images.sources.os.walk", walk)
    with pytest.raises(CorpError, match=r"permission denied: x/locked"):
        read_images(tmp_path, "calibration.path")


# --- lists ----------------------------------------------------------------------------------------------------

LISTS = {
    "plain.txt": ("a/0.png\n\n# comment\nb/with blank.png\n", ("a", "b")),
    "labelled.txt": ("a/0.png n01440764\nb/with blank.png\t7\n", ("n01440764", "7")),
    "plain.csv": ("a/0.png\nb/with blank.png\n", ("a", "b")),
    "labelled.csv": ("a/0.png,cat\nb/with blank.png,dog\n", ("cat", "dog")),
    "titles.csv": ("id,label,path\n1,cat,a/0.png\n2,dog,b/with blank.png\n", ("cat", "dog")),
    "tabs.tsv": ("file\tclass\na/0.png\tcat\nb/with blank.png\tdog\n", ("cat", "dog")),
}


@pytest.mark.parametrize("name", list(LISTS))
def test_lists_are_read_relative_to_themselves(tmp_path: Path, name: str) -> None:
    files = picture(tmp_path / "lists" / "a" / "0.png"), picture(tmp_path / "lists" / "b" / "with blank.png")
    text, folders = LISTS[name]
    (tmp_path / "lists" / name).write_text(text)
    found = read_images(tmp_path / "lists" / name, "calibration.path")
    assert found.items == files
    assert found.folders == folders


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"0.png\nnone.png\ngone.png\n", "names 2 files that do not exist, first none.png"),
        (b"\n", "names no images"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_broken_lists_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    picture(tmp_path / "0.png")
    (tmp_path / "list.txt").write_bytes(content)
    with pytest.raises(CorpError, match=rf"calibration\.path=.*{sentence}"):
        read_images(tmp_path / "list.txt", "calibration.path")


# --- tensors --------------------------------------------------------------------------------------------------

RGB = torch.arange(3 * 4 * 5 * 3, dtype=torch.uint8).reshape(3, 4, 5, 3)  # [N, H, W, C]
LAYOUTS = {
    "NHWC": RGB,
    "NCHW": RGB.permute(0, 3, 1, 2).contiguous(),
    "float NHWC": RGB / 255,
    "float NCHW": RGB.permute(0, 3, 1, 2).contiguous() / 255,
    "NHW": RGB[..., 0].contiguous(),
    "NHW1": RGB[..., :1].contiguous(),
    "N1HW": RGB[:, None, :, :, 0].contiguous(),
}


def written(path: Path, write: Callable[[Path], object]) -> Path:
    """`path`, written."""
    write(path)
    return path


def save(images: torch.Tensor, path: Path) -> Path:
    if path.suffix == ".npy":
        np.save(path, images.numpy())
    elif path.suffix == ".pt":
        torch.save(images, path)
    else:
        save_file({"images": images}, path)
    return path


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_tensors_of_every_layout_are_the_same_images(tmp_path: Path, suffix: str, layout: str) -> None:
    found = read_images(save(LAYOUTS[layout], tmp_path / f"images{suffix}"), "x")
    for item, expected in zip(found.items, RGB, strict=True):
        assert isinstance(item, torch.Tensor)
        image = from_tensor(item)
        want = expected if image.mode == "RGB" else expected[..., 0]
        assert np.array_equal(np.asarray(image), want.numpy())


def test_sixteen_bit_tensors_are_scaled() -> None:
    pixels = torch.tensor([[0, 257, 65535]], dtype=torch.uint16)
    assert np.asarray(from_tensor(pixels)).tolist() == [[0, 1, 255]]


def test_labels_beside_the_images_are_read(tmp_path: Path) -> None:
    content = {"images": RGB, "labels": torch.tensor([2, 0, 1])}
    save_file(content, tmp_path / "i.safetensors")
    torch.save(content, tmp_path / "i.pt")
    for name in ("i.safetensors", "i.pt"):
        assert read_images(tmp_path / name, "x").labels == (2, 0, 1)


class Payload:
    """A pickled object that is not a tensor."""


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda p: save(torch.zeros(2, 7, 8, 8, dtype=torch.uint8), p / "i.npy"), r"shape \[2, 7, 8, 8\]"),
        (lambda p: save(torch.zeros(8, 8), p / "i.npy"), r"shape \[8, 8\]"),
        (lambda p: save(torch.zeros(0, 8, 8), p / "i.npy"), r"shape \[0, 8, 8\]"),
        (lambda p: save(torch.full((2, 8, 8), 7.0), p / "i.pt"), "values from 7 to 7; floats must be in"),
        (lambda p: save(torch.full((2, 8, 8), float("nan")), p / "i.pt"), "values from nan"),
        (lambda p: save(torch.zeros(2, 8, 8, dtype=torch.int64), p / "i.pt"), "int64 values; save the images as uint8"),
        (lambda p: save(RGB[0, 0, 0, :1].expand(10**6, 8, 8), p / "i.pt"), "larger than what the file holds of it"),
        (lambda p: save(torch.eye(8).to_sparse(), p / "i.pt"), "a tensor that is sparse"),
        (lambda p: written(p / "i.pt", lambda f: torch.save(Payload(), f)), "pickled objects are never opened"),
        (lambda p: written(p / "i.npy", lambda f: np.save(f, np.array([{}, {}]))), "plain tensors"),
        (lambda p: written(p / "i.npy", lambda f: f.write_bytes(b"")), "plain tensors"),
        (lambda p: written(p / "i.safetensors", lambda f: f.write_bytes(b"x")), "plain tensors"),
        (lambda p: written(p / "i.safetensors", lambda f: save_file({"a": RGB, "b": RGB + 1}, f)), "named images"),
        (lambda p: written(p / "i.pt", lambda f: torch.save({"images": RGB, "labels": RGB}, f)), "give one each"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, make: Callable[[Path], Path], sentence: str) -> None:
    with pytest.raises(CorpError, match=rf"^calibration\.path=[^\n]*{sentence}"):
        read_images(make(tmp_path), "calibration.path")


# --- datasets of timm -----------------------------------------------------------------------------------------


def test_names_of_timm_datasets_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_timm_name("hfds/food101")
    assert not is_timm_name("photos/food101")
    (tmp_path / "torch" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_timm_name("torch/x")


DATA = {
    "input_size": [3, 16, 16],
    "mean": [0.5],
    "std": [0.5],
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torchvision_dataset_is_read_with_its_classes(tmp_path: Path, workers: int) -> None:
    for name in ("dog/0.png", "cat/0.png", "dog/1.png"):
        picture(tmp_path / name)
    found = find_images(CalibrationConfig(root=str(tmp_path)), "torch/image_folder", "calibration.path", None)
    assert found.folders == ("cat", "dog", "dog")
    assert found.classes == ("cat", "dog")
    pixels, _ = next(batches(found, eval_transform(DATA), 3, workers))
    assert pixels.shape == (3, 3, 16, 16)


def test_a_dataset_that_must_be_downloaded_first_is_said_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match=r"needs calibration\.root=FOLDER"):
        find_images(CalibrationConfig(), "torch/cifar10", "calibration.path", None)
    with pytest.raises(CorpError, match=r"download it first: python -c .*'torch/cifar10', .*download=True"):
        find_images(CalibrationConfig(root=str(tmp_path)), "torch/cifar10", "calibration.path", None)


class Table:
    """What timm's reader of Hugging Face datasets uses of one."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns
        self.column_names = list(columns)

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def add_column(self, name: str, column: list[Any]) -> Table:
        return Table(**self.columns, **{name: column})


class HuggingFace:
    def __init__(self, table: Table, input_key: str | None, target_key: str | None) -> None:
        self.reader, self.dataset = self, table
        self.image_key, self.label_key = input_key or "image", target_key or "label"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        row = self.dataset[index]
        return row[self.image_key], row[self.label_key]


def test_columns_have_names_and_labels_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(image=[None] * 3, img=[Image.new("RGB", (16, 16))] * 3, fine=[2, 0, 1])

    def create(*_: object, input_key: str | None, target_key: str | None, **__: object) -> HuggingFace:
        return HuggingFace(table, input_key, target_key)

    monkeypatch.setattr("corp_cli.models.datasets.create_dataset", create)

    def read(**keys: str) -> ImageSet:
        return find_images(CalibrationConfig(**keys), "hfds/x", "calibration.path", None)  # type: ignore[arg-type]

    for keys, folders, expected in (
        ({"image_key": "img"}, ("", "", ""), [-1, -1, -1]),
        ({"image_key": "img", "label_key": "fine"}, ("2", "0", "1"), [2, 0, 1]),
    ):
        found = read(**keys)
        assert found.folders == folders
        assert not found.labelled  # what the folders mean is found out later
        assert [int(found.items[i].reader.read(i)[1]) for i in range(3)] == expected  # type: ignore[union-attr]
    with pytest.raises(
        CorpError, match=r"hfds/x has no column image, only img, fine; name one by calibration\.image_k"
    ):
        read()
    with pytest.raises(CorpError, match=r"has no column coarse, only .*img, fine; name one by calibration\.label_key"):
        read(image_key="img", label_key="coarse")


def test_a_stream_is_read_in_order_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streamed:
        def __len__(self) -> int:
            return 0  # as timm's do where they do not know

        def __iter__(self) -> object:
            return ((Image.new("RGB", (16, 16), (i * 10, 0, 0)), i) for i in range(9))

    monkeypatch.setattr("corp_cli.models.datasets.create_dataset", lambda *_, **__: Streamed())
    found = read_dataset("wds/x", None, "train", "calibration.path", limit=6)
    assert len(found) == 6
    assert found.labelled
    for _ in range(2):
        read = list(batches(found.subset([1, 2, 5]), eval_transform({**DATA, "input_size": [3, 16, 16]}), 2, 2))
        assert torch.cat([labels for _, labels in read]).tolist() == [1, 2, 5]
        assert [round(float(x[0] * 127.5 + 127.5)) for batch, _ in read for x in batch[:, :, 0, 0]] == [10, 20, 50]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), "needs the package datasets; pip install"),
        (ConnectionError("Couldn't reach\nthe hub"), r"opened \(.*no test asks it; Couldn't reach the hub\)"),
        (AssertionError(), r"cannot be opened \(.*; AssertionError"),
    ],
)
def test_datasets_out_of_reach_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("corp_cli.models.datasets.create_dataset", fail)
    with pytest.raises(CorpError, match=rf"^calibration\.path=hfds/food101 [^\n]*{sentence}"):
        read_dataset("hfds/food101", None, "train", "calibration.path", None)


def test_home_is_expanded_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert at_home("calibration.path=~/photos") == "calibration.path=/home/someone/photos"
    assert at_home("~calibration") == "~calibration"  # Hydra's way to delete a key
    assert at_home("model.name=vit~/x") == "model.name=vit~/x"
