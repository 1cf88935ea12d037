"""`corp` as a user mistypes it, and when its work fails: one sentence, an exit code, and what stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corp_cli import commands
from corp_cli.cli.main import main
from corp_cli.cli.table import COMMANDS
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError, causes, stop_within
from corp_cli.files.output import STATE
from corp_cli.files.owned import claim
from tests.support.typed import fail_with, files, one_sentence, put_module

pytestmark = pytest.mark.usefixtures("empty_folder")


# Mistakes: argv → words that the one line on stderr must hold

CHOICES = ["deit_base", "vit_digits", "vit_tiny"]
MISTAKES = [
    (["prun"], ["prun", "did you mean prune?"]),
    (["shrink"], ["shrink", ", ".join(COMMANDS)]),
    (["model=deit_tiny"], ["corp prune model=deit_tiny"]),
    (["-m", "prune"], ["-m", "must follow a command"]),
    (["prune", "modl=deit_tiny"], ["no key modl", "did you mean model?"]),
    (["prune", "model=deit_tny"], ["model=deit_tny", "did you mean deit_tiny?", *CHOICES]),
    (["prune", "model=deit_tiny_patch16_224"], ["model=deit_tiny_patch16_224", "model.name", *CHOICES]),
    (["prune", "model=5"], ["model=5", *CHOICES]),
    (["prune", "model=null"], ["model=null", *CHOICES]),
    (["prune", "-m", "model=deit_tiny,deit_tny"], ["model=deit_tny", "did you mean deit_tiny?"]),
    (["prune", "recipe=foo"], ["recipe=foo", "choose best, kwon, optin or paper"]),
    (["prune", "sparsity=0.5"], ["sparsity=0.5", "uniform", "sparsity.joint"]),
    (["prune", "calibration=/photos"], ["calibration=/photos", "folder", "calibration.path"]),
    (["prune", "hydra/launcher=nope"], ["hydra/launcher=nope", "basic"]),
    (["prune", "-m", "hydra/launcher=rq"], ["hydra/launcher=rq", "not installed", "pip install hydra-rq-launcher"]),
    (["prune", "hydra/sweeper=ax"], ["hydra/sweeper=ax", "not installed", "pip install hydra-ax-sweeper"]),
    (["prune", "sparsity.jiont=0.5"], ["no key sparsity.jiont", "did you mean sparsity.joint?"]),
    (["prune", "sparsity.zzzzzz=1"], ["no key sparsity.zzzzzz", "sparsity.mlp"]),
    (["prune", "zzzzzz=1"], ["no key zzzzzz", "corp prune --help"]),
    (["prune", "export.formats=onnx,timm"], ["write export.formats=[onnx,timm] for all in one run"]),
    (["prune", "export=onnx,timm"], ["write export.formats=[onnx,timm]"]),
    (["prune", "export=[onnx,timm]"], ["write export.formats=[onnx,timm]"]),
    (["prune", "export.formats=onxn"], ["export.formats=onxn is not a choice", "onnx, openvino"]),
    (["prune", "export.formats=null"], ["as in export.formats=[onnx,openvino]"]),
    (["prune", "export.formats=3"], ["export.formats=3 is not a list"]),
    (["prune", "export.int8=8", "export=onnx"], ["export.int8=8 is not a choice", "true for dynamic"]),
    (["bench", "model=vit_digits", "dtypes=float32,float16"], ["write dtypes=[float32,float16]"]),
    (["bench", "model=vit_digits", "dtypes=fp16"], ["dtypes=fp16 is not a choice", "float16"]),
    (["export", "model=vit_digits", "format=[onnx]"], ["format takes one; write format=onnx."]),
    (["export", "model=vit_digits", "format=[onnx,timm]"], ["write format=onnx, or add -m", "-m format=onnx,timm"]),
    (["export", "model=vit_digits", "format=onnx,timm"], ["corp export -m format=onnx,timm"]),
    (["export", "model=vit_digits", "export=onnx"], ["no key export; did you mean format?"]),
    (["export", "model=vit_digits", "calibration=photos"], ["no choices of calibration", "calibration.path"]),
    (["prune", "joint=0.5"], ["no key joint", "did you mean sparsity.joint?"]),
    (["prune", "mlp=0.5"], ["sparsity.mlp, ranker.mlp or compensation.mlp"]),
    (["prune", "+sparsity.jiont=0.5"], ["no key sparsity.jiont"]),
    (["prune", "++foo=1"], ["no key foo"]),
    (["prune", "+model.name=x"], ["model.name", "leave out the +"]),
    (["prune", "~sparsity.joint"], ["sparsity.joint"]),
    (["prune", "--model", "deit_tiny"], ["--model", "write model=deit_tiny"]),
    (["prune", "--model=deit_tiny", "seed=1"], ["write model=deit_tiny"]),
    (["prune", "--joint", "0.5"], ["write sparsity.joint=0.5"]),
    (["prune", "--weights", "dense.pth"], ["write model.checkpoint=dense.pth"]),
    (["prune", "--verbose"], ["--verbose", "corp prune --help"]),
    (["prune", "deit_tiny"], ["deit_tiny", "write model=deit_tiny"]),
    (["prune", "paper"], ["write recipe=paper"]),
    (["prune", "dense.safetensors"], ["write model.checkpoint=dense.safetensors"]),
    (["prune", "vit_small_patch14_dinov2"], ["write model.name=vit_small_patch14_dinov2"]),
    (["prune", "."], ["write calibration.path=."]),
    (["evaluate", "pruned.safetensors"], ["write checkpoint=pruned.safetensors"]),
    (["prune", "sparsity.flops=0.4"], ["no key sparsity.flops", "did you mean sparsity.macs?"]),
    (["prune", "flops=0.4"], ["no key flops", "did you mean sparsity.macs?"]),
    (["prune", "output_dir=here"], ["did you mean hydra.run.dir?"]),
    (["prune", "-m", "sparsity.joint=0.25,", "0.5"], ["write sparsity.joint=0.25,0.5"]),
    (["prune", "sparsity.joint = 0.5"], ["write sparsity.joint=0.5"]),
    (["prune", "sparsity.joint", "=", "0.5"], ["write sparsity.joint=0.5"]),
    (["prune", "sparsity.joint=", "0.5"], ["write sparsity.joint=0.5"]),
    (["prune", "sparsity.joint", "=0.5"], ["write sparsity.joint=0.5"]),
    (["prune", "experiment=small"], ["no key experiment", "corp prune --help"]),
    (["prune", "foo.bar=1"], ["no key foo.bar", "corp prune --help"]),
    (["prune", "joint=0.5"], ["no key joint", "did you mean sparsity.joint?"]),
    (["prune", "hydra.rum.dir=x"], ["hydra.rum.dir", "--hydra-help"]),
    (["prune", "sparsity.joint=abc"], ["sparsity.joint=abc", "a number"]),
    (["prune", "seed=1.5"], ["seed=1.5", "a whole number"]),
    (["prune", "seed=null"], ["seed=null", "must have a value"]),
    (["prune", "model.pretrained=maybe"], ["model.pretrained=maybe", "true or false"]),
    (["prune", "model.name=[a,b]"], ["model.name"]),
    (["prune", "seed=${nope}"], ["seed", "nope"]),
    (["prune", "sparsity.joint=1"], ["sparsity.joint=1 is out of range"]),
    (["prune", "-m", "sparsity.joint=0.5,-1"], ["sparsity.joint=-1 is out of range"]),
    (["prune", "sparsity.joint=0.5", "sparsity.mlp=0.5"], ["sparsity.joint", "sparsity.mlp"]),
    (["prune", "ranker.mlp=foo"], ["ranker.mlp=foo", "activation, magnitude, random"]),
    (["prune", "sparsity.joint=0.25,0.5"], ["sparsity.joint=0.25,0.5", "add -m"]),
    (["prune", "seed=range(3)"], ["seed=range(3)", "add -m"]),
    (["prune", "-m", "sparsity.joint=interval(0,1)"], ["-m", "range("]),
    (["prune", "calibration.path=a=b"], ["""'calibration.path="a=b"'"""]),
    (["prune", "calibration.path=[a"], ["calibration.path=[a cannot be read"]),
    (["prune", "modell"], ["'modell'", "key=value", "model"]),
    (["prune", ""], ["''", "key=value"]),
    (["prune", "--config-dir", "nope"], ["nope", "not a folder"]),
    (["prune", "--config-dir"], ["--config-dir", "expected one argument"]),
    (["prune", "--config-name", "nope"], ["nope", "prune"]),
    (["prune", "--config-path", "x"], ["--config-path", "--config-dir"]),
    (["prune", "hydra.searchpath=[nope]"], ["nope", "not a folder"]),
    (["prune", "--bogus"], ["--bogus", "corp prune --help"]),
    (["prune", "--cfg", "jbo"], ["jbo", "job"]),
    (["prune", "--cfg", "job", "--package", "modl"], ["modl"]),
    (["prune", "-m", "--cfg", "job"], ["--multirun", "--cfg"]),
    (["prune", "modl=x", "--help"], ["did you mean model?"]),
    (["prune", "modl=x", "--cfg", "job"], ["did you mean model?"]),
    (["prune", "hydra.run.dir=/proc/nope/x"], ["/proc/nope", "hydra.run.dir"]),
    (["evaluate"], ["corp evaluate checkpoint=", "model="]),
    (["evaluate", "sparsity=uniform"], ["sparsity", "corp evaluate"]),
    (["evaluate", "model=deit_tny"], ["did you mean deit_tiny?"]),
    (["bench"], ["corp bench checkpoint="]),
    (["bench", "pruned.safetensors"], ["checkpoint=pruned.safetensors"]),
    (["bench", "checkpoint=a", "model=deit_tiny"], ["corp bench checkpoint="]),
    (["bench", "checkpoint=a", "batch_sizes=[0]"], ["batch_sizes=0", "at least 1"]),
    (["bench", "checkpoint=a", "batch_sizes=[]"], ["batch_sizes=[]", "at least one"]),
    (["bench", "checkpoint=a", "dtypes=[float64]"], ["dtypes=float64", "bfloat16"]),
    (["bench", "checkpoint=a", "runs=0"], ["runs=0"]),
    (["info"], ["corp info checkpoint="]),
    (["info", "pruned.safetensors"], ["checkpoint=pruned.safetensors"]),
    (["info", "chekpoint=x"], ["did you mean checkpoint?"]),
    (["info", "-m", "checkpoint=a,b"], ["leave out --multirun"]),
    (["-sc"], ["install=SHELL", "bash, zsh, fish"]),
    (["-sc", "install=tcsh"], ["bash, zsh, fish"]),
]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("argv", "words"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistake_ends_in_one_sentence_and_leaves_nothing(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    one_sentence(capsys, words)
    assert not list(Path().iterdir())


FILES = [
    ("defaults: [_self_]\nseed: 1", ["defaults list"]),
    ("sede: 1", ["my.yaml", "sede", "did you mean seed?"]),
    ("seed: x", ["my.yaml", "seed", "Integer"]),
    ("- seed", ["my.yaml"]),
    ("seed: [1", ["my.yaml, line 1"]),
    ("defaults: [prune, _self_]\nsede: 1", ["my.yaml", "sede", "did you mean seed?"]),
    ("defaults: [prune, _self_]\nseed: x", ["my.yaml", "seed", "Integer"]),
    ("defaults: [prune, model/nope, _self_]", ["my.yaml", "model/nope"]),
    ("defaults: [prune, nope/nope, _self_]", ["my.yaml", "nope/nope"]),
    ("defaults: [prune, _self_]\nseed: -1", ["seed=-1"]),
]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("text", "words"), FILES, ids=[text for text, _ in FILES])
def test_mistake_in_own_config(text: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text(text)
    assert main(["prune", "--config-dir", ".", "--config-name", "my"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("corp: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert files() == ["my.yaml"]


# Failures of the work itself


def test_corp_error_removes_the_unused_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, CorpError("There are no images in\n  photos."))
    Path("outputs").mkdir()
    assert main(["prune"]) == 2
    assert capsys.readouterr() == ("", "corp: There are no images in photos.\n")
    assert list(Path().iterdir()) == [Path("outputs")]  # it was there before
    assert not list(Path("outputs").iterdir())


def test_corp_error_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, CorpError("no."), leaving="pruned.safetensors")
    assert main(["prune"]) == 2
    assert any(name.endswith("pruned.safetensors") for name in files())


def test_corp_error_keeps_a_folder_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, CorpError("no."))
    Path("here").mkdir()
    assert main(["prune", "hydra.run.dir=here"]) == 2
    assert Path("here").is_dir()


def test_bug_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["prune"]) == 1
    assert capsys.readouterr().err == (
        "corp: unexpected error: ZeroDivisionError: division by zero; "
        "set CORP_DEBUG=1 to see the traceback, and please report it\n"
    )


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, CorpError("no."))
    monkeypatch.setenv("CORP_DEBUG", "1")
    assert main(["prune"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\ncorp: no.\n")


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["prune"]) == 130
    assert capsys.readouterr().err == "corp: interrupted.\n"
    assert not list(Path().iterdir())


def test_causes_of_one_another_are_gone_through_once() -> None:
    """As a library makes them by raising, in the handler of an error, that error again."""
    first, second, other = ValueError("first"), ValueError("second"), KeyboardInterrupt()
    first.__cause__, second.__context__ = second, first
    assert causes(first) == [first, second]
    assert stop_within(first) is None
    second.__cause__ = other
    assert stop_within(first) is other


@pytest.mark.parametrize("error", [ImportError("numpy"), SystemError("a result with an exception set")])
def test_ctrl_c_that_native_code_made_an_error_of(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error.__cause__ = KeyboardInterrupt()
    fail_with(monkeypatch, error)
    assert main(["prune"]) == 130
    assert capsys.readouterr().err == "corp: interrupted.\n"


def test_sigterm_is_as_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(cfg: PruneConfig, output_dir: Path) -> None:
        kept = claim(output_dir / STATE)
        assert kept
        (kept / "statistics-0.safetensors").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    put_module(monkeypatch, "prune", commands, run=run)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a library that another test has loaded may have its own
    assert main(["prune", "hydra.run.dir=run"]) == 143
    assert capsys.readouterr().err == f"corp: terminated; go on with: corp prune resume={Path('run').absolute()}\n"
    assert Path("run/prune.log").read_text().endswith("terminated\n")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m corp_cli prune --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""
