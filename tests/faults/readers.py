"""What is fuzzed: (lays sound files, changes them for one input, reads them), by name."""

from __future__ import annotations

import csv
import functools
import io
import json
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_cli.commands import check, info
from corp_cli.config.gate import CheckConfig
from corp_cli.config.prune import InfoConfig, ModelConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.curves import read_curves
from corp_cli.files.cache.statistics import read_statistics
from corp_cli.files.checkpoint import load_pruned
from corp_cli.files.manifest import FORMAT
from corp_cli.images.batches import Intake, batches
from corp_cli.images.labels import make_head, read_class_map, with_label_file
from corp_cli.images.sources import ImageSet, read_images
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import load_dense
from corp_cli.models.preprocess import eval_transform
from corp_cli.models.state_dict import read_state_dict
from corp_cli.sizes.plan_file import read_plan
from tests.faults.forks import narrow
from tests.faults.mutations import JUNK, WORDS, as_text, in_bytes, in_json, in_text
from tests.faults.undisturbed import undisturbed

CPU = torch.device("cpu")


@functools.cache
def made(kind: str = "uniform") -> Path:
    """The folder of a run; what is made before the fork is made once."""
    return undisturbed(kind).folder


def copied(*names: str, kind: str = "uniform") -> None:
    """Sound files of a run under their own names."""
    for name in names:
        found = next(made(kind).rglob(name))
        shutil.copyfile(found, "sound" + found.suffix)


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


# --- checkpoints -----------------------------------------------------------------------------------------------


def a_manifest(rng: Random) -> Path:
    """The checkpoint with a manifest that says something else."""
    data = Path("sound.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    content = json.loads(header["__metadata__"][FORMAT])
    text = as_text(in_json(content, rng)) if rng.random() < 0.85 else in_text(as_text(content), rng)
    header["__metadata__"][FORMAT] = text
    head = json.dumps(header).encode()
    Path("bad.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data[end:])
    return Path("bad.safetensors")


def read_checkpoint(path: Path) -> None:
    for read in (load_pruned, lambda path: info.run(InfoConfig(str(path)), Path())):
        try:
            read(path)
        except CorpError:
            continue


# --- plans, reports, settings ----------------------------------------------------------------------------------


@functools.cache
def dense_blocks() -> Any:
    """The blocks that plans are read for."""
    tiny = narrow()
    model, _ = load_dense(ModelConfig(tiny.timm_name, pretrained=False, args=tiny.args))
    return blocks_of(model)


def a_plan(rng: Random) -> Path:
    text = in_text(Path("sound.yaml").read_text(), rng)
    if rng.random() < 0.02:
        text = (
            "a0: &a0 [x]\n"
            + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
            + "blocks: *a8"
        )
    Path("bad.yaml").write_text(text, "utf-8", errors="surrogatepass")
    return Path("bad.yaml")


def check_report(path: Path) -> None:
    for report, against in ((path, None), (path, "sound.json"), ("sound.json", path)):
        check.run(
            CheckConfig(report=str(report), against=None if against is None else str(against), junit="junit.xml"),
            Path(),
        )


def overrides(rng: Random) -> list[str]:
    """A command line with something odd in it."""
    keys: tuple[str, ...] = (
        "sparsity.joint",
        "sparsity.mlp",
        "sparsity.macs",
        "seed",
        "device",
        "model",
        "model.args",
        "+model.args.depth",
    )
    keys += (
        "calibration.path",
        "calibration.num_images",
        "compensation.ridge_lambda",
        "data.mean",
        "recipe",
        "gate",
        "~gate",
    )
    keys += ("export.formats", "evaluation.labels", "hydra.run.dir", "ranker", "resume", "++x.y", "+experiment", "")
    values: tuple[str, ...] = (
        *map(str, (*JUNK, *WORDS)),
        "0.5",
        "[a",
        "{a:1",
        "${x}",
        "${hydra:runtime.cwd}",
        "a=b",
        "'",
        "1,2",
        "null",
        "~",
        "$",
    )
    found = [
        f"{rng.choice(keys)}{rng.choice(('=', '=', '=', '==', ' = ', ''))}{rng.choice(values)}"
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return [in_text(word, rng).replace("\0", "") if rng.random() < 0.3 else word for word in found]


def take(words: list[str]) -> None:
    """As typed; only the work is left out."""
    from corp_cli import commands
    from corp_cli.cli import main as cli

    commands.prune.run = lambda *_, **__: None
    raised: list[BaseException] = []
    report: Any = cli.report

    def noting(error: BaseException, *args: Any) -> int:
        raised.append(error)
        return report(error, *args)

    vars(cli)["report"] = noting
    try:
        code = cli.main(["prune", *words, "--dry-run"])
    finally:
        vars(cli)["report"] = report
    if code not in (0, 2):
        raise raised[-1] if raised else RuntimeError(f"exit {code} of {words}")


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


ALL: dict[str, tuple[Any, Any, Any]] = {
    "manifest": (lambda: copied("pruned.safetensors"), a_manifest, read_checkpoint),
    "header": (lambda: copied("pruned.safetensors"), some_bytes("sound.safetensors"), read_checkpoint),
    "plan": (lambda: copied("plan.yaml"), a_plan, lambda path: read_plan(path, dense_blocks(), 1, 0)),
    "report": (lambda: copied("report.json"), text_or_json("sound.json", "bad.json"), check_report),
    "labels": (
        lay_labels,
        some_labels("sound.csv", "sound.tsv", "sound.txt", "sound.json", "list.json"),
        read_labels,
    ),
    "class map": (
        lay_labels,
        some_labels("sound.csv", "sound.json"),
        lambda path: read_class_map(str(path), make_head(10, {}, [])),
    ),
    "list": (
        lay_labels,
        some_labels("sound.csv", "sound.tsv", "sound.txt"),
        lambda path: read_images(path, "calibration.path"),
    ),
    "image": (lay_images, some_bytes(*SOUND_IMAGES), read_image),
    "weights": (lay_tensors, some_bytes("sound.safetensors", "sound.pth", "old.pt"), read_state_dict),
    "images in tensors": (
        lay_tensors,
        some_bytes("images.npy", "images.pt", "images.safetensors"),
        lambda path: read_images(path, "calibration.path"),
    ),
    "statistics": (
        lambda: copied("statistics-*.safetensors", kind="cache"),
        some_bytes("sound.safetensors"),
        lambda path: read_statistics(path, CPU),
    ),
    "curves": (
        lambda: copied("curves-*.json", kind="cached budget"),
        text_or_json("sound.json", "bad.json"),
        lambda path: read_curves(path, json.loads(Path("sound.json").read_text())["key"]),
    ),
    "config.json": (lay_transformers, text_or_json("config.json", "hf/config.json"), read_transformers),
    "preprocessor_config.json": (
        lay_transformers,
        text_or_json("preprocessor_config.json", "hf/preprocessor_config.json"),
        read_transformers,
    ),
    "overrides": (lambda: None, overrides, take),
}
