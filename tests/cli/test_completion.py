"""Shell completion: what it offers, in every shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from corp_cli.cli.completion import candidates
from corp_cli.cli.main import main
from corp_cli.cli.table import COMMANDS

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("corp ", list(COMMANDS)),
        ("corp study experiment=table", [f"experiment=table{i}" for i in (1, 2, 3, 4)]),
        ("corp study --dr", ["--dry-run"]),
        ("corp analyze thr", ["threshold="]),
        ("corp evaluate mod", ["model.", "model="]),
        ("corp evaluate sparsi", []),
        ("corp evaluate evaluation.path=ph", ["evaluation.path=photos/"]),
        ("corp bench dtypes=[b", ["dtypes=[bfloat16]"]),
        ("corp pr", ["prune"]),
        ("corp nope ", []),
        ("corp prune model=vit_d", ["model=vit_digits"]),
        ("corp prune model=deit_tiny comp", ["compensation.", "compensation="]),
        ("corp prune sparsity.j", ["sparsity.joint="]),
        ("corp prune ranker.qk=", ["ranker.qk=activation", "ranker.qk=magnitude", "ranker.qk=random"]),
        ("corp prune compensation.qk=s", ["compensation.qk=sylvester"]),
        ("corp prune --mul", ["--multirun"]),
        ("corp prune --dr", ["--dry-run"]),
        ("corp prune --dry-run dry", ["dry_run="]),
        ("corp evaluate --dr", []),
        ("corp doc", ["doctor"]),
        ("corp prune -m see", ["seed="]),
        ("corp prune calibration.path=ph", ["calibration.path=photos/"]),
        ("corp prune --config-dir ph", ["photos/"]),
        ("corp prune --config-dir photos model=n", ["model=net"]),
        ("corp info check", ["checkpoint="]),
        ("corp prune gate=", ["gate=none"]),
        ("corp export format=o", ["format=onnx", "format=openvino"]),
        ("corp prune export=o", ["export=onnx", "export=openvino"]),
        ("corp export int8=s", ["int8=static"]),
        ("corp prune evaluation.precision=b", ["evaluation.precision=bfloat16"]),
        ("corp check ph", ["photos/"]),
        ("corp check photos/a.jpg --aga", ["--against"]),
        ("corp check photos/a.jpg --against photos/a", ["photos/a.jpg"]),
        ("corp check photos/a.jpg --against b.json gate.top1", ["gate.top1_drop="]),
        ("corp check gate=s", ["gate=strict"]),
        ("corp pu", ["push"]),
        ("corp push me/small che", ["checkpoint="]),
        ("corp push --dr", ["--dry-run"]),
        ("corp push me/small --dry-run checkpoint=a priv", ["private="]),
        ("corp push me/small folder=ph", ["folder=photos/"]),
        ("corp push private=f", ["private=false"]),
        ("corp report output=pho", ["output=photos/"]),
        ("corp report photos/ photos/m", ["photos/model/"]),
        ("corp info checkpoint=photos/", ["checkpoint=photos/a.jpg", "checkpoint=photos/model/"]),
    ],
)
def test_candidates(line: str, expected: list[str]) -> None:
    Path("photos/model").mkdir(parents=True)
    Path("photos/a.jpg").touch()
    Path("photos/b c.jpg").touch()
    Path("photos/model/net.yaml").write_text("name: net\n")
    assert candidates(line, list(COMMANDS)) == expected


def test_hydras_own_keys_are_not_offered() -> None:
    found = candidates("corp prune ", list(COMMANDS))
    assert "model=" in found
    assert not [candidate for candidate in found if candidate.startswith("hydra")]


@pytest.mark.parametrize("line", ["corp prune --nope seed=1 mod", "corp prune [ mod", "corp prune modl=x sparsity."])
def test_what_cannot_be_completed_is_no_error(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr() == ("\n", "")


BASH = """eval "$(corp -sc install=bash)"
COMP_LINE="$1" COMP_POINT=${#1}
_corp_complete corp
printf '%s|' "${COMPREPLY[@]}"
eval "$(corp -sc uninstall=bash)"
type _corp_complete > /dev/null 2>&1 || printf gone"""
FISH = """corp -sc install=fish | source
printf '%s|' (complete -C $argv[1])
corp -sc uninstall=fish | source
functions -q _corp_complete; or printf gone"""


@pytest.fixture
def with_corp_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "corp"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m corp_cli "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("with_corp_on_path")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("corp pr", "prune |gone"),
        ("corp prune model=vit_d", "vit_digits |gone"),  # readline replaces only what follows the '='
        ("corp prune sparsity.j", "sparsity.joint=|gone"),
    ],
)
def test_bash(line: str, expected: str) -> None:
    done = subprocess.run(["bash", "-c", BASH, "bash", line], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == expected


@pytest.mark.usefixtures("with_corp_on_path")
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish() -> None:
    command = ["fish", "--no-config", "-c", FISH, "corp prune model=vit_d"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "model=vit_digits|gone"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_parse(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for action in ("install", "uninstall"):
        assert main(["-sc", f"{action}={shell}"]) == 0
        subprocess.run([shell, "-n"], input=capsys.readouterr().out, text=True, check=True)
