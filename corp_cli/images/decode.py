"""Pixels as a model wants them: any image that Pillow opens, or a tensor, as an upright 8-bit L or RGB image."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

# What may be opened: photographs as people keep them. Not EPS, which Pillow hands to Ghostscript to run, nor videos.
KNOWN = (
    *("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "MPO"),
    *("PCX", "PNG", "PPM", "QOI", "SGI", "TGA", "TIFF", "WEBP"),
)
MAX_PIXELS = 178_956_970  # where Pillow itself refuses: above half a gigabyte
MAX_ASPECT = 100  # of the longer side to the shorter, which is resized to what the model takes: a strip would explode

Image.init()
FORMATS = tuple(name for name in KNOWN if name in Image.OPEN)
EXTENSIONS = tuple(suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS)
warnings.filterwarnings("ignore", module=r"PIL\.")  # of large images, for which there are limits here, and odd tags


def require_bounds(image: Image.Image) -> None:
    """Raise ValueError for an image, not decoded yet, that would take too much memory to decode or to resize."""
    short, long = sorted(image.size)
    if short * long > MAX_PIXELS or long > MAX_ASPECT * short:
        limits = f"over {MAX_PIXELS} pixels, or more than {MAX_ASPECT} times as long as wide"
        raise ValueError(f"{image.width}x{image.height} pixels: {limits}")


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """`image`, fully decoded and upright, in `mode` ("L" or "RGB").

    Rotated as its EXIF tag says. 16 bits are scaled to 8, where Pillow's own convert would clip them. Alpha is
    dropped, as Pillow's convert, timm and torchvision do: the colour below a transparent pixel counts.
    Raises what Pillow raises for an image that is broken.
    """
    image.load()
    with contextlib.suppress(Exception):  # sound pixels may carry a broken EXIF block: they are used as they lie
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # I;16 and its byte orders; older Pillows open 16-bit PNGs as I
        image = _scaled(image, 255 / 65535)
    elif image.mode == "F":
        image = _scaled(image, 255.0 if _maximum(image) <= 1 else 1.0)
    elif image.mode in ("LAB", "La"):  # which Pillow takes to one other mode only
        image = image.convert("RGB" if image.mode == "LAB" else "LA")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the step that Pillow asks for
    return image if image.mode == mode else image.convert(mode)


def nearly_black(image: Image.Image | Tensor) -> bool:
    """Whether a decoded image has more than 8 bits and leaves the upper four of 16 unused, as 12-bit cameras do."""
    if isinstance(image, Tensor):
        return image.dtype == torch.uint16 and int(image.numpy().max()) < 2**12
    return image.mode.startswith("I") and _maximum(image) < 2**12


def _maximum(image: Image.Image) -> float:
    return float(np.asarray(image).max())


def _scaled(image: Image.Image, factor: float) -> Image.Image:
    pixels = np.nan_to_num(np.asarray(image).astype(np.float32) * factor)
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def from_tensor(pixels: Tensor) -> Image.Image:
    """[H, W] or [H, W, C] as an image: uint8 as it is, uint16 scaled to 8 bits, floats in [0, 1] times 255."""
    if pixels.dtype == torch.uint16:
        pixels = pixels.float() / 65535
    if pixels.is_floating_point():
        pixels = (pixels.float() * 255).round().clamp(0, 255).to(torch.uint8)
    array = pixels.numpy()
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)
