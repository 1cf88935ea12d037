"""The Dockerfile, without docker: what it copies is enough to install corp, and it runs as an ordinary user."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT, code_blocks, read
from tests.support.project import PROJECT, require_no_complaint


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) in order, without comments; broken lines are joined."""
    text = re.sub(r"^\s*#.*\n", "", read("Dockerfile"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


STEPS = instructions()
COPIES = [shlex.split(rest) for word, rest in STEPS if word == "COPY" and not rest.startswith("--from")]
PIP = [shlex.split(rest) for word, rest in STEPS if word == "RUN" and "/pip install" in rest]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/source of the image as it is when the package is installed."""
    folder = tmp_path_factory.mktemp("source")
    for *sources, target in COPIES:
        for source in sources:
            path = folder / target / (source if target.endswith("/") else "")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, path, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, path)
    return folder


def test_the_base_is_one_named_version_of_python() -> None:
    bases = {rest.partition(" AS ")[0] for word, rest in STEPS if word == "FROM"}
    (base,) = bases  # of both stages: the environment is copied from one into the other
    version = re.fullmatch(r"python:3\.(\d+)-slim-\w+", base)
    assert version
    assert int(version[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))


def test_it_runs_as_an_ordinary_user() -> None:
    words = [word for word, _ in STEPS]
    last = max(i for i, word in enumerate(words) if word == "FROM")
    users = [rest for word, rest in STEPS[last:] if word == "USER"]
    assert users == ["1000"]
    (made,) = [rest for word, rest in STEPS[last:] if word == "RUN" and "useradd" in rest]
    assert f"--uid {users[0]} " in made
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert ("ENTRYPOINT", '["corp"]') in STEPS
    assert "corp" in PROJECT["scripts"]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    lines = [line for line in read(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for *sources, _ in COPIES for source in sources}
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_torch_is_installed_first_from_an_index_that_can_be_chosen() -> None:
    torch, package = PIP
    (required,) = [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("torch>")]
    assert torch[1:] == ["install", "--index-url", "${TORCH_INDEX}", required, "torchvision"]
    assert ("ARG", "TORCH_INDEX=https://download.pytorch.org/whl/cpu") in STEPS
    assert package[1:] == ["install", "."]
    words = [rest for word, rest in STEPS if word in ("RUN", "COPY")]
    assert words.index(shlex.join(package)) > words.index("corp_cli corp_cli")


@pytest.mark.slow
def test_pip_installs_corp_from_what_is_copied(context: Path, tmp_path: Path) -> None:
    """The command of the Dockerfile, but offline, and into a folder."""
    _, package = PIP
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *package[1:], *offline], cwd=context, check=True)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.suffix != ".pyc"}
    assert {"corp_cli/configs/prune.yaml", "corp_cli/bundled/vit_digits.safetensors", "bin/corp"} <= found
    code = "import corp_cli; print(corp_cli.__file__)"
    alone = {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert said.stdout.strip() == str(tmp_path / "corp_cli/__init__.py"), said.stderr


def test_hadolint_has_nothing_to_say() -> None:
    require_no_complaint("hadolint", ROOT / "Dockerfile")


def test_the_page_mounts_the_folders_of_the_image() -> None:
    (bash,) = [block.body for block in code_blocks(read("docs/usage.md")) if "docker run" in block.body]
    (volumes,) = [rest for word, rest in STEPS if word == "VOLUME"]
    mounted = set(re.findall(r":(/\w+)", bash))
    assert mounted == set(re.findall(r"/\w+", volumes))
