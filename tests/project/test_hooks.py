"""The hooks of pre-commit: a valid config that runs what `make lint` runs, and stops a commit where a tool does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.documents import ROOT, read

pytest.importorskip("pre_commit", reason="needs pre-commit: pip install -e '.[dev]'")

CONFIG = ".pre-commit-config.yaml"
HOOKS = [hook for repo in yaml.safe_load(read(CONFIG))["repos"] for hook in repo["hooks"]]


def recipe(target: str) -> list[list[str]]:
    """The commands of a target of the Makefile, its variables filled in."""
    text = read("Makefile")
    values = dict(re.findall(r"^(\w+) \??:?= (.+)$", text, re.MULTILINE))
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    while "$(" in lines:
        lines = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], lines)
    return [shlex.split(line) for line in lines.splitlines()]


def execute(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    plain |= {"PRE_COMMIT_HOME": str(cwd / ".cache"), "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, cwd=cwd, env=plain, capture_output=True, text=True)


def pre_commit(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return execute(sys.executable, "-m", "pre_commit", *args, cwd=cwd)


def test_the_config_is_valid(tmp_path: Path) -> None:
    done = pre_commit("validate-config", str(ROOT / CONFIG), cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_hooks_are_the_commands_of_make_lint() -> None:
    assert [shlex.split(hook["entry"]) for hook in HOOKS] == recipe("lint")
    assert all(hook["pass_filenames"] is False for hook in HOOKS)  # each looks at all, as make does


@pytest.mark.parametrize("broken", [None, ".venv/bin/mypy"])
def test_a_commit_runs_them_and_is_stopped_by_the_tool_that_fails(tmp_path: Path, broken: str | None) -> None:
    """In a checkout whose tools only note that they ran."""
    (tmp_path / CONFIG).write_text(read(CONFIG))
    (tmp_path / "code.py").touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for tool in {shlex.split(hook["entry"])[0] for hook in HOOKS}:
        path = tmp_path / tool
        path.write_text(f'#!/bin/sh\necho {tool} "$@" >> .venv/ran\nexit {int(tool == broken)}\n')
        path.chmod(0o755)
    assert execute("git", "init", "--quiet", cwd=tmp_path).returncode == 0
    assert execute("git", "add", CONFIG, "code.py", cwd=tmp_path).returncode == 0
    assert pre_commit(*recipe("hooks")[0][1:], cwd=tmp_path).returncode == 0
    author = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    done = execute("git", *author, "commit", "--quiet", "-m", "code", cwd=tmp_path)
    assert [shlex.split(line) for line in (tmp_path / ".venv/ran").read_text().splitlines()] == recipe("lint")
    assert done.returncode == (0 if broken is None else 1), done.stderr
