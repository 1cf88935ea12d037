"""What the tests of the README and of the guides share: the commands that a page shows, and whether corp takes them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from corp_cli import commands as corp_commands
from corp_cli.cli import main as cli
from corp_cli.cli.table import COMMANDS
from tests.support.typed import put_module

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
FLAGS = {"-m", "--multirun", "--cfg", "--help", "--config-dir", "--dry-run"}


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page; `marked` if it stands below <!-- test: run -->."""

    marked: bool
    language: str
    body: str


def read(page: str) -> str:
    """The text of a page, by its path from the top of the checkout."""
    return (ROOT / page).read_text("utf-8")


def code_blocks(text: str) -> list[CodeBlock]:
    """The fenced blocks of a page, in order."""
    found = re.findall(r"^(<!-- test: run -->\n)?```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [CodeBlock(bool(marked), language, body) for marked, language, body in found]


def commands(bash: str) -> list[list[str]]:
    """The arguments of every `corp …` in a bash block, without what the shell does around it."""
    found = []
    for line in bash.replace("\\\n", " ").splitlines():
        line = re.sub(r'^eval "\$\((.*)\)"', r"\1", line)
        words = shlex.split(re.sub(r"\s\| source$", "", line), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables set for this command
            del words[0]
        if words[:1] == ["corp"]:
            found.append(words[1:])
    return found


def commands_of(text: str) -> list[list[str]]:
    """The arguments of every `corp …` of a page."""
    return commands("".join(block.body for block in code_blocks(text) if block.language == "bash"))


def is_plain(argv: list[str]) -> bool:
    """Whether all that follows `corp prune` are overrides."""
    return argv[:1] == ["prune"] and not FLAGS & set(argv)


def write_yaml(text: str, folder: Path) -> None:
    """The YAML files that a page shows, each named in its first line."""
    for block in code_blocks(text):
        if block.language == "yaml" and block.body.startswith("# "):
            path = folder / block.body.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body)


def check_understood(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As typed, through the command line itself; only the work is left out."""
    asked: list[Any] = []
    for command in COMMANDS:
        put_module(monkeypatch, command, corp_commands, run=lambda config, *folders: asked.append(config))
    monkeypatch.delenv("CORP_DEBUG", raising=False)
    for saved in (Path(word) for word in argv if word.endswith("/.hydra")):  # the config of an earlier run
        assert cli.main(["prune", f"hydra.run.dir={saved.parent}"]) == 0
        asked.clear()
    assert cli.main(argv) == 0
    assert capsys.readouterr().err == ""
    shows_only = {"--help", "--cfg", "-sc"} & set(argv)
    assert bool(asked) != bool(shows_only)


def in_backticks(cell: str) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`]+)`", cell)


def anchors(text: str) -> set[str]:
    """What a link into a page may name: its headings, as GitHub writes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
