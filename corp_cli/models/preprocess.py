"""timm's own preprocessing for a model, and what its class indices mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset
from torch import Tensor, nn

from corp_cli.config.images import LEAST_CROP, DataConfig
from corp_cli.errors import CorpError
from corp_cli.images.decode import to_mode


@dataclass(frozen=True)
class EvalTransform:
    """PIL image → [C, H, W] in float32, as the model was trained to see it.

    In two steps: what is done image by image leaves 8 bits a value, a quarter of the bytes to move and to keep, and
    the rest is done for a whole batch on its device.
    """

    transform: Any
    mode: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Image.Image) -> Tensor:
        """`image` as the model was trained to see it."""
        return self.scaled(self.pixels(image))

    def pixels(self, image: Image.Image) -> Tensor:
        """`image` resized and cropped, [C, H, W] in uint8."""
        tensor: Tensor = self.transform(to_mode(image, self.mode))
        return tensor

    def scaled(self, pixels: Tensor) -> Tensor:
        """(pixels / 255 - mean) / std of [..., C, H, W] in uint8, where they are; rounded as timm's transform does."""
        values = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        mean, std = (torch.tensor(numbers)[:, None, None].to(values) for numbers in (self.mean, self.std))
        return values.sub_(mean).div_(std)


def eval_transform(data: dict[str, Any]) -> EvalTransform:
    """timm's evaluation transform for `data`, which is ModelSpec.data. Raises CorpError but for 1 or 3 channels."""
    channels = data["input_size"][0]
    if channels not in (1, 3):
        raise CorpError(
            f"The model takes {channels} channels, and corp reads images of 1 or 3; see model.args.in_chans."
        )
    for key in ("mean", "std"):
        values = torch.tensor(data[key], dtype=torch.float32)
        if len(values) not in (1, channels) or not values.isfinite().all() or (key == "std" and 0 in values):
            raise CorpError(
                f"The model's preprocessing has {key}={data[key]} for {channels} channels; set data.{key} to one "
                "finite value each, and data.std to none that is 0."
            )
    if not LEAST_CROP <= data["crop_pct"] <= 1:
        raise CorpError(
            f"The model's preprocessing has crop_pct={data['crop_pct']:g}; set data.crop_pct from {LEAST_CROP} to 1."
        )
    sized = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    to_pixels = create_transform(**sized, is_training=False, use_prefetcher=True)  # which ends before the arithmetic
    return EvalTransform(to_pixels, "L" if channels == 1 else "RGB", tuple(data["mean"]), tuple(data["std"]))


def with_overrides(data: dict[str, Any], cfg: DataConfig, model: nn.Module) -> dict[str, Any]:
    """`data` of the model with what `cfg` sets in its place. Raises CorpError where the model cannot take it."""
    given = {key: value for key, value in asdict(cfg).items() if value is not None}
    channels = data["input_size"][0]
    for key in {"mean", "std"} & given.keys():
        if len(given[key]) not in (1, channels):
            count = len(given[key])
            raise CorpError(f"data.{key} has {count} values and the model {channels} channels; give one each.")
        given[key] = given[key] * (channels // len(given[key]))
    if "input_size" in given:
        given["input_size"] = [channels, *given["input_size"]]
        _require_size(given["input_size"][1:], model)
    return {**data, **given}


# What timm's pretrained_cfg says of an architecture; the rest of it is of timm's own weights.
OF_ARCHITECTURE = ("architecture", "fixed_input_size", "min_input_size", "pool_size", "first_conv", "classifier")


def put_own_cfg(model: Any, data: dict[str, Any]) -> None:
    """Let `pretrained_cfg` and `default_cfg` of `model` say what is its own: its images, as in `data`, and its classes.

    timm.data.resolve_model_data_config(model) answers with `data`, for training and for testing. Where timm's weights
    come from, their tag and their licence are left out: they are those of other weights.
    """
    said = {key: value for key, value in model.pretrained_cfg.items() if key in OF_ARCHITECTURE}
    named = {"label_names": names} if (names := model.pretrained_cfg.get("label_names")) else {}
    model.pretrained_cfg = model.default_cfg = {**said, **data, "num_classes": model.num_classes, **named}


def _require_size(size: list[int], model: Any) -> None:
    embed = getattr(model, "patch_embed", None)
    fixed = getattr(embed, "img_size", None)
    if fixed and getattr(embed, "strict_img_size", False) and list(fixed) != size:
        shown = ",".join(map(str, size))
        raise CorpError(
            f"data.input_size=[{shown}] does not suit the model, which takes {list(fixed)}; "
            f"build it for that size with '+model.args.img_size=[{shown}]'."
        )


def describe(data: dict[str, Any]) -> str:
    """One line on how images are prepared: what a wrong mean or resize would show in."""
    channels, height, width = data["input_size"]

    def numbers(values: list[float]) -> str:
        return "/".join(f"{value:.4g}" for value in values)

    return (
        f"{height}x{width}, {channels} channel{'s' if channels > 1 else ''}, {data['interpolation']}, "
        f"crop_pct {data['crop_pct']:g} ({data['crop_mode']}), mean {numbers(data['mean'])}, std {numbers(data['std'])}"
    )


# --- classes --------------------------------------------------------------------------------------------------


def wordnet_classes(num_classes: int) -> dict[str, int]:
    """WordNet id → class index of an ImageNet head with `num_classes` outputs; empty where timm knows none."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is None:
        return {}
    names: list[str] = ImageNetInfo(subset).label_names()
    return {name: index for index, name in enumerate(names)}


def class_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of every class of the model's head, by index: its own label names and WordNet's words, if any."""
    count = int(getattr(model, "num_classes", 0) or 0)
    own: list[str] = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or []
    subset = infer_imagenet_subset({"num_classes": count})
    words: list[str] = ImageNetInfo(subset).label_descriptions() if subset else []
    # "tench, Tinca tinca" is known by the whole and by each of its parts.
    named = [(text, *text.split(", ")) for text in words] or [()] * count
    return [(*names, name) for names, name in zip(named, own, strict=True)] if len(own) == count else named
