"""What is fuzzed of images, labels, lists, tensors and the folders of transformers: see `readers`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_cli.config.prune import ModelConfig
from corp_cli.images.batches import Intake, batches
from corp_cli.images.labels import make_head, with_label_file
from corp_cli.images.sources import ImageSet
from corp_cli.models.loading import load_dense
from corp_cli.models.preprocess import eval_transform
from tests.faults.forks import narrow
from tests.faults.mutations import as_text, in_bytes, in_json, in_text


def text_or_json(sound: str, name: str) -> Any:
    """Changes the JSON in the file `sound`, as values or as text, into the file `name`."""

    def mutate(rng: Random) -> Path:
        text = Path(sound).read_text()
        changed = as_text(in_json(json.loads(text), rng)) if rng.random() < 0.75 else in_text(text, rng)
        Path(name).write_text(changed, "utf-8", errors="surrogatepass")
        return Path(name)

    return mutate


def some_bytes(*sounds: str) -> Any:
    """Changes the bytes of one of the files."""

    def mutate(rng: Random) -> Path:
        sound = Path(rng.choice(sounds))
        path = Path("bad" + sound.suffix)
        path.write_bytes(in_bytes(sound.read_bytes(), rng))
        return path

    return mutate


# --- labels and lists ------------------------------------------------------------------------------------------


def lay_labels() -> None:
    rows = [[f"{number:03}.png", str(number % 10)] for number in range(12)]
    for name, _ in rows:
        Image.new("L", (8, 8)).save(name)
    text = io.StringIO()
    csv.writer(text).writerows([["file", "label"], *rows])
    Path("sound.csv").write_text(text.getvalue())
    Path("sound.tsv").write_text("\n".join("\t".join(row) for row in rows))
    Path("sound.txt").write_text("\n".join(" ".join(row) for row in rows))
    Path("sound.json").write_text(json.dumps({name: [int(label)] for name, label in rows}))
    Path("list.json").write_text(json.dumps([[int(label)] for _, label in rows]))


def some_labels(*sounds: str) -> Any:
    def mutate(rng: Random) -> Path:
        sound = rng.choice(sounds)
        if sound.endswith(".json"):
            return text_or_json(sound, "bad.json")(rng)
        path = Path("bad" + Path(sound).suffix)
        text = in_text(Path(sound).read_text(), rng).replace("/etc/passwd", "x")
        data = text.encode("utf-8", errors="surrogatepass")
        path.write_bytes(in_bytes(data, rng) if rng.random() < 0.2 else data)
        return path

    return mutate


def read_labels(path: Path) -> None:
    names = tuple(Path(f"{number:03}.png") for number in range(12))
    with_label_file(ImageSet("images", names, ("",) * 12), str(path), make_head(10, {}, []))


# --- images ----------------------------------------------------------------------------------------------------

DATA = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop_pct": 0.9}


def lay_images() -> None:
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 256, (24, 20, 3), np.uint8))
    grey16 = Image.fromarray(rng.integers(0, 65536, (24, 20)).astype(np.uint16))
    for ending in ("png", "jpg", "webp", "tiff", "bmp"):
        colour.save(f"rgb.{ending}")
    colour.save("exif.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0")
    colour.save("lzw.tiff", compression="tiff_lzw")
    colour.convert("P").save("palette.gif")
    colour.convert("P").save("palette.png", transparency=3)
    colour.convert("CMYK").save("cmyk.jpg")
    colour.convert("LAB").save("lab.tiff")
    colour.convert("F").save("float.tiff")
    grey16.save("grey16.png")


SOUND_IMAGES: tuple[str, ...] = (
    "rgb.png",
    "rgb.jpg",
    "rgb.webp",
    "rgb.tiff",
    "rgb.bmp",
    "exif.jpg",
    "lzw.tiff",
    "palette.gif",
    "palette.png",
)
SOUND_IMAGES += ("cmyk.jpg", "lab.tiff", "float.tiff", "grey16.png")


def read_image(path: Path) -> None:
    """In colour and in grey."""
    for data in (DATA, {**DATA, "input_size": [1, 32, 32], "mean": [0.5], "std": [0.5]}):
        intake = Intake("images", "max_bad", 10)
        for pixels, _ in batches(ImageSet("images", (path,), ("",)), eval_transform(data), 1, 0, intake=intake):
            assert pixels.shape[-2:] == (32, 32)
            assert pixels.isfinite().all()


# --- tensors ---------------------------------------------------------------------------------------------------


def lay_tensors() -> None:
    state = load_file(narrow().weights)
    save_file(state, "sound.safetensors")
    torch.save(state, "sound.pth")
    torch.save({"state_dict": state}, "old.pt", _use_new_zipfile_serialization=False)
    images = torch.zeros(4, 8, 8, dtype=torch.uint8)
    np.save("images.npy", images.numpy())
    torch.save({"images": images, "labels": torch.arange(4)}, "images.pt")
    save_file({"images": images, "labels": torch.arange(4)}, "images.safetensors")


# --- folders of transformers -----------------------------------------------------------------------------------


def lay_transformers() -> None:
    """A small ViT as transformers writes it."""
    wide, hidden, state = 16, 32, {}
    shapes = {"attention.attention.query": (wide, wide), "attention.attention.key": (wide, wide)}
    shapes |= {"attention.attention.value": (wide, wide), "attention.output.dense": (wide, wide)}
    shapes |= {"intermediate.dense": (hidden, wide), "output.dense": (wide, hidden)}
    for name, shape in shapes.items():
        state[f"vit.encoder.layer.0.{name}.weight"] = torch.randn(shape)
        state[f"vit.encoder.layer.0.{name}.bias"] = torch.zeros(shape[0])
    for name in ("encoder.layer.0.layernorm_before", "encoder.layer.0.layernorm_after", "layernorm"):
        state |= {f"vit.{name}.weight": torch.ones(wide), f"vit.{name}.bias": torch.zeros(wide)}
    state["vit.embeddings.cls_token"] = torch.zeros(1, 1, wide)
    state["vit.embeddings.position_embeddings"] = torch.zeros(1, 17, wide)
    state["vit.embeddings.patch_embeddings.projection.weight"] = torch.randn(wide, 3, 8, 8)
    state["vit.embeddings.patch_embeddings.projection.bias"] = torch.zeros(wide)
    state |= {"classifier.weight": torch.randn(2, wide), "classifier.bias": torch.zeros(2)}
    Path("hf").mkdir(exist_ok=True)
    save_file(state, "hf/model.safetensors")
    config = {"model_type": "vit", "hidden_size": wide, "image_size": 32, "patch_size": 8, "num_channels": 3}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": hidden, "hidden_act": "gelu"}
    config |= {"layer_norm_eps": 1e-12, "qkv_bias": True, "id2label": {"0": "cat", "1": "dog"}}
    about = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "size": {"height": 32, "width": 32}}
    about |= {"do_resize": True, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "do_normalize": True}
    for name, content in (("config.json", config), ("preprocessor_config.json", about)):
        Path("hf", name).write_text(json.dumps(content))
        Path(name).write_text(json.dumps(content))
    load_dense(ModelConfig("transformers:hf"))


def read_transformers(path: Path) -> None:
    _, spec = load_dense(ModelConfig("transformers:hf"))
    eval_transform(spec.data)(Image.new("RGB", (40, 40)))
