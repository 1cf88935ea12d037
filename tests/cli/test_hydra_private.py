"""What corp takes from Hydra's private modules: in one place, and with the versions that it was tried with."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import corp_cli
from corp_cli.cli.hydra_app import config_loader
from corp_cli.cli.hydra_private import TRIED, args_parser, candidates, keys_of_choice


def test_one_module_imports_them() -> None:
    package = Path(corp_cli.__file__).parent
    using = [str(path.relative_to(package)) for path in package.rglob("*.py") if "_internal" in path.read_text("utf-8")]
    assert using == ["cli/hydra_private.py"]


def test_the_versions_that_are_allowed_are_those_that_it_was_tried_with() -> None:
    needs = [Requirement(line) for line in metadata.requires("corp-cli") or []]
    (allowed,) = [need.specifier for need in needs if need.name == "hydra-core"]
    first, last = TRIED
    assert {str(part) for part in allowed} == {f">={first}", "<1.4"}
    assert allowed.contains(last)
    assert re.match(r"1\.3\.\d+$", metadata.version("hydra-core"))
    assert allowed.contains(metadata.version("hydra-core"))


def test_what_it_gives() -> None:
    loader = config_loader(None)
    assert keys_of_choice(loader, "model/deit_tiny") == {"name", "pretrained", "checkpoint", "args"}
    assert keys_of_choice(loader, "model/nope") is None
    assert "model=vit_digits" in candidates(loader, "prune", ["seed=1", "model=vit_d"])
    flags = args_parser().parse_args(["seed=1", "-m"])
    assert (flags.overrides, flags.multirun, flags.config_dir) == (["seed=1"], True, None)
