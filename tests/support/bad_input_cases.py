"""The bad inputs of tests/cli/test_bad_inputs.py: what is typed, and words that the answer must hold."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.bad_input_files import (
    QUICK,
    WEIGHTS,
    Model,
    both,
    corrupt_photos,
    dense,
    fill,
    foreign,
    photos,
    pruned,
    read_only,
    reshape,
    written,
)

PHOTOS = ["calibration.path=photos", *QUICK]
TIMM = ["model.name=vit_tiny_patch16_224", "model.pretrained=false", "+model.args.depth=1"]
LIMIT = ["gate.max_top1_drop=1"]
DENSE = ["prune", *QUICK, "model.checkpoint=dense.safetensors"]


@dataclass(frozen=True)
class Case:
    """One bad input: what is typed, in a folder that `prepare` has filled, and words that the answer must hold."""

    name: str
    argv: list[str]
    words: tuple[str, ...]
    prepare: Callable[[], None] = lambda: None
    file_limit_kib: int | None = None  # writes beyond it fail, as on a full disk


COMMAND_LINE = [
    Case("misspelt command", ["prun"], ("did you mean prune?",)),
    Case("override before the command", ["model=deit_tiny", "prune"], ("must follow a command",)),
    Case("misspelt key", ["prune", "sparsity.jiont=0.5"], ("did you mean sparsity.joint?",)),
    Case("misspelt group", ["prune", "modl=deit_tiny"], ("did you mean model?",)),
    Case("misspelt choice", ["prune", "model=deit_tny"], ("did you mean deit_tiny?",)),
    Case("unknown choice", ["prune", "recipe=magic"], ("recipe=magic",)),
    Case("key added with +", ["prune", "+sparsity.jiont=0.5"], ("no key sparsity.jiont",)),
    Case("no key=value", ["prune", "photos"], ("'photos'", "key=value")),
    Case("unreadable value", ["prune", "calibration.path=[a"], ("cannot be read",)),
    Case("list without -m", ["prune", "sparsity.joint=0.25,0.5"], ("add -m",)),
    Case("unknown flag", ["prune", "--bogus"], ("--bogus",)),
    Case("config folder missing", ["prune", "--config-dir", "nope"], ("not a folder",)),
    Case("config missing", ["prune", "--config-dir", ".", "--config-name", "nope"], ("nope",)),
    Case(
        "config is no YAML",
        ["prune", "--config-dir", ".", "--config-name", "my"],
        ("my.yaml, line 1",),
        written("my.yaml", "seed: [1"),
    ),
    Case(
        "config with a wrong key",
        ["prune", "--config-dir", ".", "--config-name", "my"],
        ("did you mean seed?",),
        written("my.yaml", "sede: 1"),
    ),
    Case(
        "config of another command",
        ["bench", "--config-dir", ".", "--config-name", "my"],
        ("sparsity",),
        written("my.yaml", "sparsity: {joint: 0.5}"),
    ),
]
VALUES = [
    Case("sparsity 1.0", ["prune", "sparsity.joint=1.0"], ("sparsity.joint=1 is out of range",)),
    Case("sparsity negative", ["prune", "sparsity.mlp=-0.1"], ("sparsity.mlp=-0.1 is out of range",)),
    Case("sparsity not a number", ["prune", "sparsity.qk=half"], ("must be a number",)),
    Case("sparsity nan", ["prune", "sparsity.qk=nan"], ("out of range",)),
    Case("joint with mlp", ["prune", "sparsity.joint=0.5", "sparsity.mlp=0.5"], ("sparsity.joint", "sparsity.mlp")),
    Case("one bad value of a sweep", ["prune", "-m", "sparsity.joint=0.5,1.5"], ("1.5 is out of range",)),
    Case(
        "merging without a budget",
        ["prune", "sparsity.joint=0.5", "sparsity.merge_tokens=true"],
        ("give sparsity.macs or",),
    ),
    Case("round_to 0", ["prune", "sparsity.round_to=0"], ("at least 1",)),
    Case("unknown ranker", ["prune", "ranker.mlp=best"], ("activation", "magnitude")),
    Case("unknown compensation", ["prune", "compensation.qk=best"], ("sylvester",)),
    Case("ridge negative", ["prune", "compensation.ridge_lambda=-1"], ("at least 0",)),
    Case("seed negative", ["prune", "seed=-1"], ("seed=-1",)),
    Case("batch of 0", ["prune", "calibration.batch_size=0"], ("at least 1",)),
    Case("no images asked for", ["prune", "calibration.num_images=0"], ("at least 1",)),
    Case("max_bad above 1", ["prune", "calibration.max_bad=2"], ("calibration.max_bad=2",)),
    Case("crop_pct 0", ["prune", "data.crop_pct=0"], ("data.crop_pct=0",)),
    Case("unknown interpolation", ["prune", "data.interpolation=cubic"], ("bicubic",)),
    Case("mean of another number of channels", ["prune", *QUICK, "data.mean=[0.5,0.5,0.5]"], ("data.mean",)),
    Case("input size the model lacks", ["prune", *QUICK, "data.input_size=16"], ("data.input_size",)),
    Case("absent GPU", ["prune", *QUICK, "device=cuda:77"], ("device=cuda:77 is not available",)),
    Case("unknown device", ["prune", *QUICK, "device=gpu"], ("device=gpu is not a device",)),
    Case(
        "too few tokens without a ridge",
        ["prune", *QUICK, "sparsity.joint=0.5", "calibration.num_images=1", "compensation.ridge_lambda=0"],
        ("images",),
    ),
]
DATA = [
    Case("no images named", ["prune", *TIMM], ("set calibration.path",)),
    Case("folder missing", ["prune", "calibration.path=nowhere"], ("nowhere does not exist",)),
    Case("folder empty", ["prune", *PHOTOS], ("photos",), lambda: Path("photos").mkdir()),
    Case("folder without images", ["prune", *PHOTOS], ("photos",), written("photos/a/notes.md", "hello")),
    Case("a file that holds no images", ["prune", "calibration.path=a.pdf"], ("a.pdf",), written("a.pdf", "%PDF")),
    Case("list of missing files", ["prune", "calibration.path=a.txt"], ("a.txt",), written("a.txt", "b.png\nc.png\n")),
    Case("list empty", ["prune", "calibration.path=a.txt"], ("a.txt",), written("a.txt", "")),
    Case("too many corrupt images", ["prune", *PHOTOS], ("calibration.max_bad",), corrupt_photos(20)),
    Case("all images corrupt", ["prune", *PHOTOS, "calibration.max_bad=1"], ("photos",), corrupt_photos(40)),
    Case("text files named .jpg", ["prune", *PHOTOS], ("cannot be read",), written("photos/a.jpg", "hello")),
    Case("empty file named .png", ["prune", *PHOTOS], ("cannot be read",), written("photos/a.png", b"")),
    Case(
        "array of another shape",
        ["prune", "calibration.path=a.npy", *QUICK],
        ("a.npy",),
        lambda: np.save("a.npy", np.zeros(7, np.uint8)),
    ),
    Case("array cut off", ["prune", "calibration.path=a.npy", *QUICK], ("a.npy",), written("a.npy", b"\x93NUMPY\x01")),
    Case(
        "tensors without images",
        ["prune", "calibration.path=a.safetensors", *QUICK],
        ("images",),
        lambda: save_file({"x": torch.zeros(2)}, "a.safetensors"),
    ),
    Case("evaluation folder missing", ["prune", *QUICK, "evaluation.path=nowhere"], ("evaluation.path", "nowhere")),
    Case(
        "corrupt evaluation images",
        ["prune", *QUICK, "evaluation.path=photos"],
        ("evaluation.max_bad",),
        corrupt_photos(20),
    ),
    Case("labels missing", ["prune", *QUICK, "evaluation.labels=nope.txt"], ("nope.txt",)),
    Case(
        "labels of another number",
        ["prune", *PHOTOS, "evaluation.path=photos", "evaluation.labels=l.txt"],
        ("l.txt", "40 images"),
        both(photos, written("l.txt", "1\n2\n3\n")),
    ),
    Case(
        "labels beyond the classes",
        ["prune", *PHOTOS, "evaluation.path=photos", "evaluation.labels=l.txt"],
        ("l.txt", "0 to 9"),
        both(photos, written("l.txt", "1000\n" * 40)),
    ),
    Case(
        "class map of nonsense",
        ["prune", *PHOTOS, "evaluation.path=photos", "evaluation.class_map=m.csv"],
        ("m.csv",),
        both(photos, written("m.csv", "cat,first\ndog,second\n")),
    ),
]
CHECKPOINTS = [
    Case("checkpoint missing", DENSE, ("does not exist",)),
    Case("checkpoint is a folder", DENSE, ("is a folder",), lambda: Path("dense.safetensors").mkdir()),
    Case("checkpoint empty", DENSE, ("is empty",), written("dense.safetensors", b"")),
    Case(
        "checkpoint truncated",
        DENSE,
        ("not a whole safetensors file",),
        written("dense.safetensors", WEIGHTS.read_bytes()[:100_000]),
    ),
    Case("checkpoint of another model", DENSE, ("missing", "unexpected (conv1.bias"), foreign),
    Case("tensors of another shape", DENSE, ("1 tensors missing (norm.bias)", "(extra)", "[7, 96]"), dense(reshape)),
    Case("NaN weights", DENSE, ("norm.weight",), dense(fill("norm.weight", torch.nan))),
    Case("infinite weights", DENSE, ("head.bias",), dense(fill("head.bias", torch.inf))),
    Case("infinite activations", DENSE, ("blocks.",), dense(fill("blocks.1.mlp.fc1.weight", 3e38))),
    Case("text instead of weights", DENSE, ("dense.safetensors",), written("dense.safetensors", "404: Not Found")),
    Case("Git LFS pointer", DENSE, ("git lfs pull",), written("dense.safetensors", "version https://git-lfs...")),
    Case(
        "pickle with code",
        ["prune", *QUICK, "model.checkpoint=model.pth"],
        ("safetensors.torch.save_file",),
        lambda: torch.save(Model(), "model.pth"),
    ),
    Case(
        "plain pickle",
        ["prune", *QUICK, "model.checkpoint=model.bin"],
        ("model.bin",),
        written("model.bin", pickle.dumps(Model())),
    ),
    Case(
        "pickle named safetensors",
        DENSE,
        ("rename it",),
        lambda: torch.save({"x": torch.zeros(1)}, "dense.safetensors"),
    ),
    Case(
        "no tensors in it",
        ["prune", *QUICK, "model.checkpoint=model.pth"],
        ("no tensors",),
        lambda: torch.save({"epoch": 3}, "model.pth"),
    ),
    Case(
        "pruned checkpoint as dense",
        ["prune", *QUICK, "model.checkpoint=pruned.safetensors"],
        ("pruned already",),
        pruned(),
    ),
]
MODELS = [
    Case("misspelt model", ["prune", "model.name=deit_tny_patch16_224", *PHOTOS], ("deit_tiny_patch16_224",), photos),
    Case(
        "no vision transformer",
        ["prune", "model.name=resnet18", "model.pretrained=false", *PHOTOS],
        ("ResNet",),
        photos,
    ),
    Case("argument that timm lacks", ["prune", *TIMM, "+model.args.legs=4", *PHOTOS], ("legs",), photos),
    Case(
        "group the layers do not allow",
        ["prune", *TIMM, "+model.args.qk_norm=true", "sparsity.joint=0.5", *PHOTOS],
        ("sparsity.qk",),
        photos,
    ),
    Case("hub out of reach", ["prune", "model.name=hf-hub:corp-no/such-model", *PHOTOS], ("HF_HUB_OFFLINE",), photos),
]
COMMANDS = [
    Case("evaluate nothing", ["evaluate"], ("corp evaluate checkpoint=",)),
    Case("evaluate a missing file", ["evaluate", "checkpoint=nope"], ("nope does not exist",)),
    Case(
        "evaluate dense weights as pruned",
        ["evaluate", f"checkpoint={WEIGHTS}"],
        ("model.checkpoint",),
    ),
    Case(
        "evaluate a truncated file", ["evaluate", "checkpoint=p.safetensors"], ("whole",), pruned("p.safetensors", 9999)
    ),
    Case("evaluate without images", ["evaluate", "checkpoint=pruned.safetensors"], ("evaluation.path",), pruned()),
    Case(
        "evaluate without labels or reference",
        ["evaluate", "checkpoint=pruned.safetensors", "evaluation.path=photos"],
        ("nothing to measure",),
        both(pruned(), photos),
    ),
    Case(
        "evaluate against another architecture",
        ["evaluate", "checkpoint=pruned.safetensors", *TIMM],
        ("cannot be compared",),
        pruned(),
    ),
    Case("bench nothing", ["bench"], ("corp bench checkpoint=",)),
    Case("bench at an unknown dtype", ["bench", "checkpoint=a", "dtypes=[int8]"], ("bfloat16",)),
    Case("bench a missing file", ["bench", "checkpoint=nope"], ("nope does not exist",)),
    Case("check nothing", ["check"], ("corp check report.json --against",)),
    Case("check without a baseline or a limit", ["check", "r.json"], ("--against", "gate.max_top1_drop")),
    Case("check a missing file", ["check", "r.json", "--against", "b.json"], ("report=r.json cannot be read",)),
    Case("check two reports", ["check", "r.json", "b.json"], ("--against b.json",)),
    Case("check half a report", ["check", "r.json", *LIMIT], ("not whole JSON",), written("r.json", '{"schema')),
    Case("check a list", ["check", "r.json", *LIMIT], ("is not a report",), written("r.json", "[]")),
    Case("check a checkpoint", ["check", str(WEIGHTS), *LIMIT], ("not whole JSON",)),
    Case(
        "check another schema version",
        ["check", "r.json", *LIMIT],
        ("schema_version 7",),
        written("r.json", '{"schema_version": 7, "model": {"timm_name": "x"}}'),
    ),
    Case("check with a misspelt tolerance", ["check", "r.json", "gate.top1=1"], ("did you mean gate.top1_drop?",)),
    Case("prune with a tolerance", ["prune", *QUICK, "gate.top1_drop=1"], ("did you mean gate.max_top1_drop?",)),
    Case(
        "prune with a limit that needs labels",
        ["prune", *QUICK, "evaluation.path=photos", "gate.max_top1_drop=1"],
        ("gate.max_top1_drop needs labels",),
        photos,
    ),
    Case("push nothing", ["push"], ("corp push owner/name checkpoint=",)),
    Case("push a missing file", ["push", "me/x", "checkpoint=nope", "folder=y", "--dry-run"], ("nope does not exist",)),
    Case("info of what the cache lacks", ["info", "checkpoint=hf-hub:corp-no/such"], ("HF_HUB_OFFLINE", "=FILE")),
    Case("info of nothing", ["info"], ("corp info checkpoint=",)),
    Case("info of dense weights", ["info", f"checkpoint={WEIGHTS}"], ("not written by corp prune",)),
]
OUTPUT = [
    Case("output below a file", ["prune", *QUICK, "hydra.run.dir=a/b"], ("hydra.run.dir",), written("a", "")),
    Case("output is a file", ["prune", *QUICK, "hydra.run.dir=a"], ("hydra.run.dir",), written("a", "")),
    Case("output where nothing can be", ["prune", *QUICK, "hydra.run.dir=/proc/nope/x"], ("hydra.run.dir",)),
    Case("sweep where nothing can be", ["prune", "-m", "seed=1,2", "hydra.sweep.dir=/proc/nope"], ("hydra.sweep.dir",)),
    Case("disk full at once", ["prune", *QUICK], ("hydra.run.dir",), file_limit_kib=0),
    Case("disk full at the end", ["prune", *QUICK], ("pruned.safetensors cannot be written",), file_limit_kib=40),
]
if os.name != "nt" and os.geteuid() != 0:  # root may write anywhere
    OUTPUT.append(Case("output locked", ["prune", "hydra.run.dir=locked/x"], ("hydra.run.dir",), read_only))
LONG = "a" * 300
NAMES = [
    Case(
        f"{command} {key} of 300 letters",
        [command, *QUICK * (command == "prune"), f"{key}={LONG}"],
        ("is no name of a file",),
    )
    for command, key in (
        *(("prune", f"{section}.path") for section in ("calibration", "evaluation")),
        *(("prune", key) for key in ("model.checkpoint", "sparsity.plan", "evaluation.labels", "hydra.run.dir")),
        *((command, "checkpoint") for command in ("info", "evaluate", "bench", "export")),
    )
]
CASES = [*NAMES, *COMMAND_LINE, *VALUES, *DATA, *CHECKPOINTS, *MODELS, *COMMANDS, *OUTPUT]
