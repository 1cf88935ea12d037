"""The README: its commands are understood, and it leads to every guide. The Python, names and links of all pages."""

from __future__ import annotations

import ast
import re
import runpy
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

import corp_cli
from corp_cli import load_config
from corp_cli.cli.table import COMMANDS as TABLE
from corp_cli.config.prune import COMPENSATIONS, RANKERS, PruneConfig
from tests.support.documents import (
    PAGES,
    ROOT,
    anchors,
    check_understood,
    code_blocks,
    commands_of,
    in_backticks,
    is_plain,
    read,
    write_yaml,
)

API = "docs/python.md"
README, METHOD, USAGE = read("README.md"), read("docs/method.md"), read("docs/usage.md")
PYTHON = {page: [b.body for b in code_blocks(read(page)) if b.language == "python" and b.marked] for page in PAGES}
del PYTHON["docs/first-steps.md"]  # needs the files of its commands: see test_guides
COMMANDS = commands_of(README)
PLAIN = [argv[1:] for argv in COMMANDS if is_plain(argv)]


def test_there_is_something_to_test() -> None:
    assert {argv[0] for argv in COMMANDS} == set(TABLE)
    assert PLAIN
    assert {page for page, blocks in PYTHON.items() if blocks} == {"README.md", "docs/usage.md", API}
    assert all(len(PYTHON[page]) >= count for page, count in (("README.md", 1), ("docs/usage.md", 2), (API, 4)))


def test_the_readme_is_short_and_leads_to_every_guide() -> None:
    assert len(README.splitlines()) <= 170
    assert set(re.findall(r"\]\((docs/[\w-]+\.md)", README)) == {page for page in PAGES if page.startswith("docs/")}


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_is_understood(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_yaml(README, tmp_path)
    check_understood(argv, monkeypatch, capsys)


@pytest.mark.parametrize("overrides", PLAIN, ids=" ".join)
def test_overrides_compose(overrides: list[str]) -> None:
    """What is an override of `corp prune` is one of `load_config`; hydra's own keys are the command's alone."""
    assert isinstance(load_config(*(o for o in overrides if not o.startswith("hydra."))), PruneConfig)


@pytest.mark.parametrize("page", PAGES)
def test_targets_of_make_exist(page: str) -> None:
    makefile = read("Makefile")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", read(page), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("page", [page for page, blocks in PYTHON.items() if blocks])
@pytest.mark.usefixtures("tiny_digits")
def test_python_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks, one after the other, each with names of its own: a later one needs only the files of the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for i, code in enumerate(PYTHON[page]):
        Path(f"block{i}.py").write_text(code)
        capsys.readouterr()
        runpy.run_path(f"block{i}.py", run_name="__main__")
        assert capsys.readouterr().out
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"plan.yaml", "pruned.safetensors", "report.html", "report.json"}


def table(text: str, first_column: str) -> list[list[str]]:
    """The rows of the table of a page whose first column has this heading, cell by cell."""
    _, _, after = text.partition(f"\n| {first_column} |")
    _, *rows = after.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def test_the_page_of_the_api_names_all_of_it() -> None:
    """Every export in the first table, with the arguments that it takes; every keyword of prune_model in another."""
    listed = {in_backticks(row[0])[0] for row in table(read(API), "name")}
    assert {name.partition("(")[0] for name in listed} == set(corp_cli.__all__)
    for name, _, given in (name.partition("(") for name in listed):
        wanted = re.findall(r"\w+", given)
        if given and wanted:
            assert wanted == list(signature(getattr(corp_cli, name)).parameters)[: len(wanted)], name
    taken = signature(corp_cli.prune_model).parameters.values()
    keywords = [key for row in table(read(API), "keyword") for key in in_backticks(row[0])]
    assert sorted(keywords) == sorted(p.name for p in taken if p.kind is p.KEYWORD_ONLY)


PAPER, BEYOND = table(METHOD, "paper"), table(METHOD, "beyond the paper")
NAMED = [*PAPER, *BEYOND, *table(METHOD, "baseline")]


@pytest.mark.parametrize("row", NAMED, ids=[row[0] for row in NAMED])
def test_what_the_tables_of_the_method_name_exists(row: list[str]) -> None:
    *_, code, tests = row
    assert in_backticks(code)
    for name in in_backticks(code):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(f"corp_cli.{module}"), attribute), name
    assert in_backticks(tests)
    for name in in_backticks(tests):
        module, _, function = name.partition(".")
        (path,) = (ROOT / "tests").rglob(f"{module}.py")
        tree = ast.parse(path.read_text("utf-8"))
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
    assert len(PAPER) > 10
    assert len(BEYOND) > 10
    assert {*range(8, 17), *range(19, 25), *range(27, 32), *range(33, 37)} <= numbers("Eq")
    assert numbers("Alg") == {1, 2, 3, 4, 5}


def test_choices_are_those_of_the_config() -> None:
    """Every ranker and compensation is named, and what recipe=best takes is in bold."""
    choices = {"ranker": RANKERS, "compensation": COMPENSATIONS}
    best, seen = load_config(), set()
    for keys, listed in table(USAGE, "setting"):
        for key in in_backticks(keys):
            group, _, name = key.partition(".")
            bold = re.findall(r"\*\*`?([^*`]+)`?\*\*", listed)
            taken = getattr(getattr(best, group), name)
            assert bold == ["null" if taken is None else str(taken)], key
            if name in choices[group]:
                assert set(in_backticks(listed)) == set(choices[group][name]), key
                seen.add(key)
    assert seen == {f"{group}.{name}" for group, names in choices.items() for name in names}


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_repository_lead_somewhere(page: str) -> None:
    text = read(page)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), link
        if anchor:
            assert anchor in anchors(path.read_text("utf-8")), link
    for name in in_backticks(text):
        if re.fullmatch(r"(corp_cli|configs|tests|scripts)/[\w/.-]+\.(py|yaml|md|json)", name) and name.islower():
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_wrapped(page: str) -> None:
    """Tables, and commands with their output, cannot be."""
    for line in read(page).splitlines():
        assert len(line) <= 120 or line.startswith(("|", "$ ")), line
