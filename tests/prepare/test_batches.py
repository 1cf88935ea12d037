"""Calibration images on their way to the model: as timm prepares them, and decoded once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from corp_cli.config.images import CalibrationConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.images.sources import read_images
from corp_cli.models.loaded import LoadedModel, dense_model
from corp_cli.models.preprocess import eval_transform
from corp_cli.prepare import batches
from corp_cli.prepare.batches import calibration_batches
from corp_cli.prepare.images import Images, draw_calibration

DATA: dict[str, Any] = {
    "input_size": [3, 24, 32],
    "interpolation": "bicubic",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "crop_pct": 0.9,
    "crop_mode": "center",
}


@pytest.mark.parametrize("mode", ["center", "border", "squash"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_prepared_as_timm_does(mode: str, channels: int) -> None:
    data = {**DATA, "crop_mode": mode, "input_size": [channels, 24, 32]}
    data |= {key: data[key][:channels] for key in ("mean", "std")}
    noise = torch.randint(0, 256, (50, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.numpy()).convert("RGB" if channels == 3 else "L")
    sized = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    wanted = create_transform(**sized, is_training=False)(image)
    transform = eval_transform(data)
    assert transform.pixels(image).dtype is torch.uint8
    torch.testing.assert_close(transform(image), wanted, rtol=1e-6, atol=1e-6)
    both = torch.stack([transform.pixels(image)] * 2)
    torch.testing.assert_close(transform.scaled(both)[1], wanted, rtol=1e-6, atol=1e-6)
    assert transform.scaled(both).is_contiguous()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "photos").mkdir()
    for number in range(7):
        noise = torch.randint(0, 256, (12, 12), dtype=torch.uint8, generator=generator)
        Image.fromarray(noise.numpy()).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def dense() -> LoadedModel:
    return dense_model(ModelConfig("vit_digits"))


CFG = CalibrationConfig(num_images=5, batch_size=2, num_workers=0)


def images_of(photos: Path) -> Images:
    return draw_calibration(read_images(photos, "calibration.path"), CFG, 0)[0]


def passes(images: Images, dense: LoadedModel, cfg: CalibrationConfig = CFG) -> list[Tensor]:
    return list(calibration_batches(images, dense, cfg, 0))


def test_a_second_pass_reads_no_files(photos: Path, dense: LoadedModel) -> None:
    images = images_of(photos)
    first = passes(images, dense)
    assert [len(batch) for batch in first] == [2, 2, 1]
    shutil.rmtree(photos)
    for batch, again in zip(first, passes(images, dense), strict=True):
        torch.testing.assert_close(again, batch, rtol=0, atol=0)
    smaller = passes(images, dense, replace(CFG, batch_size=1))
    torch.testing.assert_close(torch.cat(smaller), torch.cat(first), rtol=0, atol=0)
    assert images.calibrated.good == 5


def test_without_room_every_pass_reads(photos: Path, dense: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST_DECODED", 100)
    images = images_of(photos)
    first = passes(images, dense)
    torch.testing.assert_close(torch.cat(passes(images, dense)), torch.cat(first), rtol=0, atol=0)
    assert not images.decoded.batches
    shutil.rmtree(photos)
    with pytest.raises(CorpError, match="cannot be read"):
        passes(images, dense)


def test_a_pass_that_was_broken_off_is_begun_anew(photos: Path, dense: LoadedModel) -> None:
    images = images_of(photos)
    begun: Iterator[Tensor] = calibration_batches(images, dense, CFG, 0)
    next(begun)
    del begun
    assert not images.decoded.whole
    assert len(torch.cat(passes(images, dense))) == images.calibrated.good == 5
    assert sum(len(batch) for batch in images.decoded.batches) == 5
