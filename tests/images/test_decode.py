"""Images of every kind become what Pillow users expect."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from corp_cli.images.decode import nearly_black, to_mode

RED = np.array([255, 0, 0], dtype=np.uint8)


def stored(image: Image.Image, kind: str, **options: Any) -> Image.Image:
    """`image` as it comes back from a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    buffer.seek(0)
    return Image.open(buffer)


def pixels(image: Image.Image, mode: str = "RGB") -> Any:
    return np.asarray(to_mode(image, mode))


def test_exif_rotation_is_applied() -> None:
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), (255, 0, 0))  # top left
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise
    found = pixels(stored(image, "PNG", exif=exif.tobytes()))
    assert found.shape == (4, 2, 3)
    assert np.array_equal(found[0, -1], RED)


def test_broken_exif_does_not_cost_the_image() -> None:
    found = pixels(stored(Image.new("RGB", (4, 2), (255, 0, 0)), "PNG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"))
    assert np.array_equal(found[0, 0], RED)


@pytest.mark.parametrize("value", [0, 128, 255, 300, 32768, 65535])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(value: int, kind: str) -> None:
    found = pixels(stored(Image.fromarray(np.full((2, 3), value, np.uint16)), kind))
    assert found.shape == (2, 3, 3)
    assert (found == round(value / 257)).all()


def test_integers_and_floats() -> None:
    assert (pixels(Image.fromarray(np.full((2, 3), 65535, np.int32)), "L") == 255).all()
    assert (pixels(Image.fromarray(np.full((2, 3), 0.5, np.float32)), "L") == 128).all()
    assert (pixels(Image.fromarray(np.full((2, 3), 200.0, np.float32)), "L") == 200).all()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (2, 2), 77), (77, 77, 77)),
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("LA", (2, 2), (77, 0)), (77, 77, 77)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 10)), (255, 0, 0)),
        (Image.new("RGB", (2, 2), (255, 0, 0)).convert("P"), (255, 0, 0)),
        (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("HSV", (2, 2), (0, 255, 255)), (255, 0, 0)),
    ],
)
def test_modes_convert_and_alpha_is_dropped(image: Image.Image, expected: tuple[int, ...]) -> None:
    assert pixels(image)[0, 0].tolist() == list(expected)
    assert pixels(image, "L").ndim == 2


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    "stored_as",
    "1 L P RGB RGBA CMYK YCbCr LAB HSV I F LA La PA RGBX RGBa I;16 I;16B".split(),  # noqa: SIM905
)
def test_every_mode_of_pillow_becomes_what_a_model_takes(stored_as: str, mode: str) -> None:
    assert to_mode(Image.new(stored_as, (4, 4)), mode).mode == mode


def test_what_is_not_a_number_is_black() -> None:
    assert pixels(Image.fromarray(np.array([[np.nan, 200.0]], np.float32)), "L").tolist() == [[0, 200]]


def test_the_first_frame_of_an_animation_counts() -> None:
    second = Image.new("RGB", (2, 2), (0, 255, 0))
    found = pixels(stored(Image.new("RGB", (2, 2), (255, 0, 0)), "GIF", save_all=True, append_images=[second]))
    assert np.array_equal(found[0, 0], RED)


def test_twelve_bits_in_sixteen_are_noticed() -> None:
    dark, light = (np.full((2, 3), value, np.uint16) for value in (4095, 4096))
    for values, black in ((dark, True), (light, False), (dark.astype(np.uint8), False)):
        assert nearly_black(stored(Image.fromarray(values), "PNG")) == black
        assert nearly_black(torch.from_numpy(values)) == black


@pytest.mark.parametrize("transparency", [0, b"\x00\x80"])
def test_palettes_with_transparency_convert_without_a_warning(transparency: int | bytes) -> None:
    image = Image.new("RGB", (2, 2), (255, 0, 0)).convert("P")
    found = pixels(stored(image, "PNG", transparency=transparency))
    assert found.shape == (2, 2, 3)


def test_cmyk_jpeg() -> None:
    found = pixels(stored(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert found[0, 0].tolist() == pytest.approx([255, 0, 0], abs=3)
