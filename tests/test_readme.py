"""The README: its commands are understood, its Python runs, and what it names exists."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from corp_cli import cli
from corp_cli.config import PruneConfig, load_config
from corp_cli.report import Report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^(<!-- test: run -->\n)?```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
BASH = "".join(body for _, language, body in BLOCKS if language == "bash")
PYTHON = [body for marked, language, body in BLOCKS if language == "python" and marked]
YAML = [body for _, language, body in BLOCKS if language == "yaml"]


def commands() -> list[list[str]]:
    """The arguments of every `corp …` in a bash block, without what the shell does around it."""
    found = []
    for line in BASH.replace("\\\n", " ").splitlines():
        line = re.sub(r'^eval "\$\((.*)\)"', r"\1", line)
        words = shlex.split(re.sub(r"\s\| source$", "", line), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables set for this command
            del words[0]
        if words[:1] == ["corp"]:
            found.append(words[1:])
    return found


COMMANDS = commands()
FLAGS = {"-m", "--multirun", "--cfg", "--help", "--config-dir"}
PLAIN = [argv[1:] for argv in COMMANDS if argv[:1] == ["prune"] and not FLAGS & set(argv)]


def test_there_is_something_to_test() -> None:
    assert len(COMMANDS) > 20
    assert len(PLAIN) > 10
    assert len(PYTHON) >= 2


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder but for the YAML files that the README shows, each named in its first line."""
    monkeypatch.chdir(tmp_path)
    for text in YAML:
        path = tmp_path / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_is_understood(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As typed, through the command line itself; only the work is left out."""
    asked: list[Any] = []
    for command in cli.JOBS:
        monkeypatch.setitem(cli.JOBS, command, lambda config, output_dir: asked.append(config))
    monkeypatch.delenv("CORP_DEBUG", raising=False)
    assert cli.main(argv) == 0
    assert capsys.readouterr().err == ""
    shows_only = {"--help", "--cfg", "-sc"} & set(argv)
    assert bool(asked) != bool(shows_only)


@pytest.mark.parametrize("overrides", PLAIN, ids=" ".join)
def test_overrides_compose(overrides: list[str]) -> None:
    """What is an override of `corp prune` is one of `load_config`; hydra's own keys are the command's alone."""
    assert isinstance(load_config(*(o for o in overrides if not o.startswith("hydra."))), PruneConfig)


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    documents = [README, (ROOT / "CONTRIBUTING.md").read_text("utf-8")]
    for target in re.findall(r"(?:`|^)make ([a-z]+)", "\n".join(documents), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_python_runs(tmp_path: Path) -> None:
    """All blocks, one after the other, each in a process of its own: a later one needs only the files of the first."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for code in PYTHON:
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["plan.yaml", "pruned.safetensors", "report.json"]


def table(first_column: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading, cell by cell."""
    _, _, after = README.partition(f"\n| {first_column} |")
    _, *rows = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


PAPER = table("paper")


def in_backticks(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", PAPER, ids=[row[0] for row in PAPER])
def test_what_the_paper_table_names_exists(row: list[str]) -> None:
    *_, code, tests = row
    assert in_backticks(code)
    for name in in_backticks(code):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(f"corp_cli.{module}"), attribute), name
    assert in_backticks(tests)
    for name in in_backticks(tests):
        module, _, function = name.partition(".")
        tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text("utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def numbers(kind: str) -> set[int]:
    """The equations or algorithms that the first column of the table names; `19-22` is four of them."""
    found: set[int] = set()
    for row in PAPER:
        for listed in re.findall(rf"{kind}\. ((?:\d+(?:-\d+)?(?:, )?)+)", row[0]):
            for part in filter(None, listed.split(", ")):
                first, _, last = part.partition("-")
                found.update(range(int(first), int(last or first) + 1))
    return found


def test_every_equation_and_algorithm_of_the_method_is_in_the_table() -> None:
    assert {*range(8, 17), *range(19, 25), *range(27, 32), *range(33, 37)} <= numbers("Eq")
    assert numbers("Alg") == {1, 2, 3, 4, 5}


def test_fields_of_the_report_exist() -> None:
    named = {name for row in table("field") for name in in_backticks(row[0])}
    assert {"size", "evaluation", "blocks"} <= named <= {item.name for item in fields(Report)}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_inside_the_repository_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for path in in_backticks(text):
        if re.fullmatch(r"(corp_cli|configs|tests|scripts)/[\w/.-]+\.(py|yaml|md)", path) and path.islower():
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_lines_are_wrapped(document: str) -> None:
    """Tables and drawings cannot be; links may stand alone on a line."""
    for line in (ROOT / document).read_text("utf-8").splitlines():
        assert len(line) <= 120 or line.startswith("|"), line
