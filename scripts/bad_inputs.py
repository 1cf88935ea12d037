"""Bad inputs to corp, each of which must end in one plain sentence, exit code 2, and nothing left behind.

    python scripts/bad_inputs.py                 # all of them, about a minute
    python scripts/bad_inputs.py --match check   # those whose name holds "check"

Prints one table and exits with 1 if any of them ends otherwise. Needs neither network nor downloads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")  # before the hub's client and torch are imported

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from safetensors.torch import load_file, save_file

from corp_cli.cli import main as corp
from corp_cli.models.bundled import BUNDLED

WEIGHTS = BUNDLED["vit_digits"].weights
QUICK = ["calibration.num_workers=0", "evaluation.num_workers=0", "calibration.num_images=32"]
NOTE = re.compile(r"corp: (warning: |images are seen at |statistics of )")  # said besides the sentence
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


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    code: int
    stderr: str
    left: list[str]  # files and folders that were not there before

    def sentence(self) -> str:
        """The line that says what is wrong."""
        said = [line for line in self.stderr.splitlines() if not NOTE.match(line)]
        return said[0] if len(said) == 1 else self.stderr.strip()

    def problems(self, words: tuple[str, ...]) -> list[str]:
        """What is not as it should be; empty where the answer is good."""
        said = [line for line in self.stderr.splitlines() if not NOTE.match(line)]
        checks = {
            f"exit code {self.code}": self.code == 2,
            f"{len(said)} lines": len(said) == 1,
            "not from corp": all(line.startswith("corp: ") for line in said),
            "traceback": "Traceback" not in self.stderr,
            f"left {', '.join(self.left)}": not self.left,
            **{f"lacks '{word}'": word in self.sentence() for word in words},
        }
        return [problem for problem, good in checks.items() if not good]


# --- what the folders hold ------------------------------------------------------------------------------------


def photos(count: int = 40, folder: str = "photos") -> None:
    """Gray images that the bundled model can take."""
    Path(folder).mkdir(parents=True)
    for i in range(count):
        Image.new("L", (8, 8), 5 * i).save(f"{folder}/{i:03}.png")


def corrupt_photos(bad: int) -> Callable[[], None]:
    """40 images, `bad` of which are cut off."""

    def prepare() -> None:
        photos()
        for path in sorted(Path("photos").iterdir())[:bad]:
            path.write_bytes(path.read_bytes()[:40])

    return prepare


def written(name: str, content: str | bytes) -> Callable[[], None]:
    """A file of this content."""

    def prepare() -> None:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)

    return prepare


def both(*steps: Callable[[], None]) -> Callable[[], None]:
    """One after the other."""

    def prepare() -> None:
        for step in steps:
            step()

    return prepare


def dense(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[], None]:
    """dense.safetensors: the bundled weights, changed."""

    def prepare() -> None:
        state = load_file(WEIGHTS)
        change(state)
        save_file(state, "dense.safetensors")

    return prepare


def fill(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Put `value` in every place of one tensor."""

    def change(state: dict[str, torch.Tensor]) -> None:
        state[name].fill_(value)

    return change


def reshape(state: dict[str, torch.Tensor]) -> None:
    """One tensor of another shape, one missing, one too many."""
    state["head.weight"] = torch.zeros(7, 96)
    state["extra"] = torch.zeros(1)
    del state["norm.bias"]


def foreign() -> None:
    """The weights of something else."""
    save_file({"conv1.weight": torch.zeros(3, 3), "conv1.bias": torch.zeros(3)}, "dense.safetensors")


class Model:
    """A model saved whole, as code."""


def pruned(name: str = "pruned.safetensors", size: int | None = None) -> Callable[[], None]:
    """A pruned checkpoint, or its first bytes."""

    def prepare() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert corp(["prune", *QUICK, "evaluation.throughput_batches=0", "hydra.run.dir=run"]) == 0
        Path(name).write_bytes(Path("run/pruned.safetensors").read_bytes()[:size])
        shutil.rmtree("run")

    return prepare


def read_only() -> None:
    """A folder that nobody can write to."""
    Path("locked").mkdir(mode=0o500)


# --- the inputs -----------------------------------------------------------------------------------------------

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
        ["prune", *QUICK, "calibration.num_images=1", "compensation.ridge_lambda=0"],
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
    Case("infinite activations", DENSE, ("blocks.",), dense(fill("blocks.2.mlp.fc1.weight", 3e38))),
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
        "group the layers do not allow", ["prune", *TIMM, "+model.args.qk_norm=true", *PHOTOS], ("sparsity.qk",), photos
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
    Case("info of nothing", ["info"], ("corp info checkpoint=",)),
    Case("info of dense weights", ["info", f"checkpoint={WEIGHTS}"], ("not written by corp prune",)),
]
OUTPUT = [
    Case("output below a file", ["prune", *QUICK, "hydra.run.dir=a/b"], ("hydra.run.dir",), written("a", "")),
    Case("output is a file", ["prune", *QUICK, "hydra.run.dir=a"], ("hydra.run.dir",), written("a", "")),
    Case("output where nothing can be", ["prune", *QUICK, "hydra.run.dir=/proc/nope/x"], ("hydra.run.dir",)),
    Case("sweep where nothing can be", ["prune", "-m", "seed=1,2", "hydra.sweep.dir=/proc/nope"], ("hydra.sweep.dir",)),
    Case("disk full at once", ["prune", *QUICK], ("hydra.run.dir",), file_limit_kib=0),
    Case("disk full at the end", ["prune", *QUICK], ("pruned.safetensors cannot be written",), file_limit_kib=200),
]
if os.name != "nt" and os.geteuid() != 0:  # root may write anywhere
    OUTPUT.append(Case("output locked", ["prune", "hydra.run.dir=locked/x"], ("hydra.run.dir",), read_only))
CASES = [*COMMAND_LINE, *VALUES, *DATA, *CHECKPOINTS, *MODELS, *COMMANDS, *OUTPUT]


# --- running them ---------------------------------------------------------------------------------------------


def answer(case: Case) -> Outcome:
    """Type the case in a new folder."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            case.prepare()
            before = everything()
            code, stderr = run_limited(case) if case.file_limit_kib is not None else run(case.argv)
            return Outcome(code, stderr, sorted(everything() - before))
        finally:
            os.chdir(home)


def run(argv: list[str]) -> tuple[int, str]:
    """(exit code, stderr) of corp, in this process."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = corp(argv)
    return code, stderr.getvalue()


def run_limited(case: Case) -> tuple[int, str]:
    """(exit code, stderr) of corp in a process that cannot write larger files."""
    script = f'ulimit -f {case.file_limit_kib}; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "corp_cli", *case.argv]
    # Output goes through pipes, which the limit does not concern.
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def everything() -> set[str]:
    """All files and folders below the current one."""
    return {str(path) for path in Path().rglob("*")}


def main() -> int:
    """Print the table → 0 where every answer is good, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--match", default="", help="only inputs whose name holds this")
    parser.add_argument("--group", choices=sorted(GROUPS), help="only inputs of this kind")
    args = parser.parse_args()
    os.environ.pop("CORP_DEBUG", None)
    table = Table("input", "code", "what corp says", Column("", max_width=40))
    failed = 0
    cases = [case for case in (GROUPS[args.group] if args.group else CASES) if args.match in case.name]
    for case in cases:
        outcome = answer(case)
        problems = outcome.problems(case.words)
        failed += bool(problems)
        verdict = f"not ok: {'; '.join(problems)}" if problems else "ok"
        table.add_row(*(Text(cell) for cell in (case.name, str(outcome.code), outcome.sentence(), verdict)))
    console = Console(width=200)
    console.print(table)
    console.print(f"{len(cases) - failed} of {len(cases)} bad inputs are answered well.")
    return 1 if failed else 0


GROUPS = {
    "command-line": COMMAND_LINE,
    "values": VALUES,
    "data": DATA,
    "checkpoints": CHECKPOINTS,
    "models": MODELS,
    "commands": COMMANDS,
    "output": OUTPUT,
}

if __name__ == "__main__":
    sys.exit(main())
