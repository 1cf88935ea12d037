"""The image processors of Hugging Face `transformers` as timm's preprocessing, or refused where timm has none such."""

from __future__ import annotations

import math
import re
from typing import Any

from corp_cli.errors import CorpError

RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
STANDARD: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255}
STANDARD |= {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
CROPPED = {"resample": 3, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
# what each does where preprocessor_config.json says nothing
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {**STANDARD, "resample": 2, "size": {"height": 224, "width": 224}},
    "DeiT": {**STANDARD, **CROPPED, "size": {"height": 256, "width": 256}},
    "Siglip": {**STANDARD, "resample": 3, "size": {"height": 224, "width": 224}},
    "Bit": {**STANDARD, **CROPPED, **CLIP, "size": {"shortest_edge": 224}},
    "CLIP": {**STANDARD, **CROPPED, **CLIP, "size": {"shortest_edge": 224}},
}
OF_MODELS = {"vit": "ViT", "deit": "DeiT", "siglip_vision_model": "Siglip"}  # the others: Bit
NAME = re.compile(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")
ANY_SIZE = ("dinov2", "dinov2_with_registers")  # their positions are for another size than their images have


def image_data(given: dict[str, Any] | None, config: dict[str, Any], name: str) -> dict[str, Any]:
    """timm's preprocessing for what preprocessor_config.json says, `given`; without one, only the size of the model.

    Raises CorpError where timm cannot do the same.
    """
    side = config["image_size"]
    height, width = side if isinstance(side, list) else (side, side)
    data: dict[str, Any] = {"input_size": [config["num_channels"], height, width]}
    if given is None:
        return data
    kind = OF_MODELS.get(config["model_type"], "Bit")
    if said := given.get("image_processor_type") or given.get("feature_extractor_type"):
        match = NAME.fullmatch(str(said))
        kind = match[1] if match else str(said)
    try:
        if kind not in PROCESSORS:
            raise ValueError(f"it uses {kind}")
        known = {**PROCESSORS[kind], **{key: value for key, value in given.items() if value is not None}}
        return {**data, **_statistics(known), **_resizing(known, kind, (height, width), config["model_type"])}
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise CorpError(
            f"model.name={name}: preprocessor_config.json asks what corp cannot do ({error}); take the file away and "
            "say how images are prepared with data.mean, data.std, data.interpolation, data.crop_pct and "
            "data.crop_mode."
        ) from error


def _statistics(known: dict[str, Any]) -> dict[str, Any]:
    """Mean and std of values in [0, 1], into which another factor than 1/255 goes: (255 f x - m) / s."""
    if not known["do_rescale"] or known.get("do_flip_channel_order"):
        raise ValueError("do_rescale=false or do_flip_channel_order=true")
    factor = 255 * float(known["rescale_factor"])
    factor = 1.0 if math.isclose(factor, 1, rel_tol=1e-6) else factor
    normalised = known["do_normalize"]
    return {
        "mean": [v / factor for v in known["image_mean"]] if normalised else [0.0] * 3,
        "std": [v / factor for v in known["image_std"]] if normalised else [1 / factor] * 3,
    }


def _resizing(known: dict[str, Any], kind: str, model: tuple[int, int], model_type: str) -> dict[str, Any]:
    """Interpolation, and the crop as a fraction; in mode `center` the shorter edge is resized, in `squash` both."""
    if not known["do_resize"]:
        raise ValueError("do_resize=false")
    size = known["size"]
    if isinstance(size, int):
        size = {"shortest_edge": size} if kind in ("Bit", "CLIP") else {"height": size, "width": size}
    if isinstance(size, list):
        size = dict(zip(("height", "width"), size, strict=True))
    mode = "center" if set(size) == {"shortest_edge"} else "squash"
    edges = (size["shortest_edge"],) * 2 if mode == "center" else (size["height"], size["width"])
    crop = known["crop_size"] if known["do_center_crop"] else edges
    crop = (
        (crop["height"], crop["width"]) if isinstance(crop, dict) else (crop, crop) if isinstance(crop, int) else crop
    )
    if mode == "center" and (not known["do_center_crop"] or crop[0] != crop[1]):
        raise ValueError("size.shortest_edge without a square crop")
    if tuple(crop) != model and model_type not in ANY_SIZE:
        raise ValueError(f"images of {crop[0]}x{crop[1]}, and the model takes {model[0]}x{model[1]}")
    fraction = crop[0] / edges[0]
    if any(math.floor(c / fraction) != e for c, e in zip(crop, edges, strict=True)):
        fraction = crop[0] / (edges[0] + 0.5)  # timm rounds down
    if fraction > 1 or any(math.floor(c / fraction) != e for c, e in zip(crop, edges, strict=True)):
        raise ValueError(f"a crop of {crop[0]}x{crop[1]} out of {edges[0]}x{edges[1]}")
    return {"interpolation": RESAMPLE[known["resample"]], "crop_pct": fraction, "crop_mode": mode}
