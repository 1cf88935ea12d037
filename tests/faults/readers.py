"""What is fuzzed: (lays sound files, changes them for one input, reads them), by name."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import torch

from corp_cli.commands import check, info
from corp_cli.commands.report import readable_reports
from corp_cli.config.checkpoints import InfoConfig
from corp_cli.config.gate import CheckConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.files.cache.curves import read_curves
from corp_cli.files.cache.statistics import read_statistics
from corp_cli.files.checkpoint import load_pruned
from corp_cli.files.manifest import FORMAT
from corp_cli.images.labels import make_head, read_class_map
from corp_cli.images.sources import read_images
from corp_cli.models.adapter import blocks_of
from corp_cli.models.loading import load_dense
from corp_cli.models.state_dict import read_state_dict
from corp_cli.report.page.page import page
from corp_cli.report.runs import ordered, words
from corp_cli.sizes.plan_file import read_plan
from tests.faults.forks import narrow
from tests.faults.inputs import (
    SOUND_IMAGES,
    lay_images,
    lay_labels,
    lay_tensors,
    lay_transformers,
    read_image,
    read_labels,
    read_transformers,
    some_bytes,
    some_labels,
    text_or_json,
)
from tests.faults.mutations import JUNK, WORDS, as_text, in_json, in_text
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


def show_report(path: Path) -> None:
    """As a page, beside a sound one and alone."""
    for file, run in (("sound.json", "whole"), (path, "odd")):
        Path(run).mkdir(exist_ok=True)
        shutil.copyfile(file, f"{run}/report.json")
    for folders in (["whole", "odd"], ["odd"]):
        if found := readable_reports([Path(folder) for folder in folders]):
            keys, runs = ordered(run for run, _ in found)
            page([report for _, report in found], keys, [words(run, keys) for run in runs])


KEYS = [
    "sparsity.joint",
    "sparsity.mlp",
    "sparsity.macs",
    "seed",
    "device",
    "model",
    "model.args",
    "+model.args.depth",
    "calibration.path",
]
KEYS += [
    "calibration.num_images",
    "compensation.ridge_lambda",
    "data.mean",
    "recipe",
    "gate",
    "~gate",
    "export.formats",
    "ranker",
    "resume",
]
KEYS += ["evaluation.labels", "hydra.run.dir", "++x.y", "+experiment", ""]
VALUES = [
    *map(str, (*JUNK, *WORDS)),
    *["0.5", "[a", "{a:1", "${x}", "${hydra:runtime.cwd}", "a=b", "'", "1,2", "null", "~", "$"],
]


def overrides(rng: Random) -> list[str]:
    """A command line with something odd in it."""
    found = [
        f"{rng.choice(KEYS)}{rng.choice(('=', '=', '=', '==', ' = ', ''))}{rng.choice(VALUES)}"
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return [in_text(word, rng).replace("\0", "") if rng.random() < 0.3 else word for word in found]


def take(words: list[str]) -> None:
    """As typed; only the work is left out."""
    from corp_cli import commands
    from corp_cli.cli import voice
    from corp_cli.cli.main import main

    commands.prune.run = lambda *_, **__: None
    raised: list[BaseException] = []
    report: Any = voice.report

    def noting(error: BaseException, *args: Any) -> int:
        raised.append(error)
        return report(error, *args)

    vars(voice)["report"] = noting
    try:
        code = main(["prune", *words, "--dry-run"])
    finally:
        vars(voice)["report"] = report
    if code not in (0, 2):
        raise raised[-1] if raised else RuntimeError(f"exit {code} of {words}")


ALL: dict[str, tuple[Any, Any, Any]] = {
    "manifest": (lambda: copied("pruned.safetensors"), a_manifest, read_checkpoint),
    "header": (lambda: copied("pruned.safetensors"), some_bytes("sound.safetensors"), read_checkpoint),
    "plan": (lambda: copied("plan.yaml"), a_plan, lambda path: read_plan(path, dense_blocks(), 1, 17, 0)),
    "report": (lambda: copied("report.json"), text_or_json("sound.json", "bad.json"), check_report),
    "page": (lambda: copied("report.json"), text_or_json("sound.json", "bad.json"), show_report),
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
        lambda: copied("curves-*.safetensors", kind="cached budget"),
        some_bytes("sound.safetensors"),
        read_curves,
    ),
    "config.json": (lay_transformers, text_or_json("config.json", "hf/config.json"), read_transformers),
    "preprocessor_config.json": (
        lay_transformers,
        text_or_json("preprocessor_config.json", "hf/preprocessor_config.json"),
        read_transformers,
    ),
    "overrides": (lambda: None, overrides, take),
}
