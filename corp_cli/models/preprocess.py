"""timm's own preprocessing for a model, and what its class indices mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset
from torch import Tensor


def eval_transform(data: dict[str, Any]) -> Callable[[Image.Image], Tensor]:
    """PIL image → [C, H, W] as the model was trained to see it. `data` is ModelSpec.data."""
    sized = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    transform = create_transform(**sized, is_training=False)
    mode = "L" if sized["input_size"][0] == 1 else "RGB"

    def apply(image: Image.Image) -> Tensor:
        tensor: Tensor = transform(image.convert(mode))
        return tensor

    return apply


def wordnet_classes(num_classes: int) -> dict[str, int]:
    """WordNet id → class index of an ImageNet head with `num_classes` outputs; empty where timm knows none."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is None:
        return {}
    names: list[str] = ImageNetInfo(subset).label_names()
    return {name: index for index, name in enumerate(names)}
