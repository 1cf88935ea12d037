"""What commands write: valid by the shipped schemas, in their order, every field explained in docs/report.md."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Container, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import corp_cli
from corp_cli.cli.main import main
from corp_cli.cli.sweep import Row
from corp_cli.files.output import rounded
from corp_cli.images.batches import Intake
from corp_cli.images.sources import ImageSet
from corp_cli.models.adapter import blocks_of
from corp_cli.models.bundled import BUNDLED, BundledModel
from corp_cli.report.gate_input import LAYOUTS, MACHINE
from corp_cli.report.report import damage_curve, image_facts
from corp_cli.runtime.environment import cpu_name, git_commit
from corp_cli.sizes.curves import Curve
from tests.support import variants
from tests.support.documents import ROOT

SCHEMAS = Path(corp_cli.__file__).parent / "schemas"
DOCS = ROOT / "docs" / "report.md"
NAMES = ("report", "evaluation", "bench", "export", "analysis")


def schema(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    return content


def resolved(part: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """`part` without the alternative null, and in place of a reference what it refers to."""
    part = next((one for one in part.get("anyOf", []) if one.get("type") != "null"), part)
    return root["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part


def paths(part: dict[str, Any], root: dict[str, Any], apart: Container[str], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the fields below `part`, down to the parts that stand `apart`."""
    for key, value in part["properties"].items():
        inner, mark = resolved(value, root), ""
        if inner.get("type") == "array":
            inner, mark = resolved(inner.get("items", {}), root), "[]"
        if "$ref" in str(inner.get("additionalProperties")):  # by name
            assert resolved(inner["additionalProperties"], root)["title"].lower() in apart
        whole = "properties" not in inner or inner["title"].lower() in apart
        if whole or "anyOf" in value:  # an object that may be null has a line of its own
            yield f"{prefix}{key}"
        if not whole:
            yield from paths(inner, root, apart, f"{prefix}{key}{mark}.")


def documented() -> dict[str, list[str]]:
    """heading → the fields in the table below it."""
    sections = re.split(r"^##+ ", DOCS.read_text("utf-8"), flags=re.MULTILINE)[1:]
    found = {text.split("\n")[0]: re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) for text in sections}
    return {heading: lines for heading, lines in found.items() if lines}


def in_order(content: Any, part: dict[str, Any], root: dict[str, Any]) -> None:
    """Assert that keys come in the order of the schema, at every depth."""
    part = resolved(part, root)
    if isinstance(content, list):
        for item in content:
            in_order(item, part.get("items", {}), root)
    elif isinstance(content, dict) and "properties" in part:
        assert list(content) == list(part["properties"])
        for key, value in content.items():
            in_order(value, part["properties"][key], root)
    elif isinstance(content, dict) and isinstance(part.get("additionalProperties"), dict):
        for value in content.values():
            in_order(value, part["additionalProperties"], root)


@pytest.fixture(scope="module")
def written(tiny_model: BundledModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file that each command writes, for one small model."""
    folder = tmp_path_factory.mktemp("written")
    few = ["evaluation.num_images=100", "evaluation.num_workers=0"]
    quick = [*few, "device=cpu"]
    prune = ["calibration.num_images=64", "calibration.num_workers=0", "evaluation.throughput_batches=1"]
    checkpoint = f"checkpoint={folder}/report/pruned.safetensors"
    analyze = ["device=cpu", *prune[:2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUNDLED, "vit_digits", tiny_model)
        for command, name, args in (
            ("prune", "report", [*quick, *prune, "export.formats=[torchscript]"]),
            ("evaluate", "evaluation", [*quick, checkpoint, "model=vit_digits"]),
            ("bench", "bench", [checkpoint, "device=cpu", "runs=1", "batch_sizes=[1,2]", "dtypes=[float32,bfloat16]"]),
            ("export", "export", [*few, checkpoint, "format=torchscript", "evaluation.throughput_batches=1"]),
            ("analyze", "analysis", analyze),
        ):
            assert main([command, *args, f"hydra.run.dir={folder}/{name}"]) == 0
    return {name: folder / name / f"{name}.json" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_valid_and_in_order(name: str, written: dict[str, Path]) -> None:
    found, content = schema(name), json.loads(written[name].read_text("utf-8"))
    Draft202012Validator.check_schema(found)
    assert not [f"{error.json_path}: {error.message}" for error in Draft202012Validator(found).iter_errors(content)]
    in_order(content, found, found)


@pytest.mark.parametrize("name", NAMES)
def test_a_field_of_another_name_or_type_is_refused(name: str, written: dict[str, Path]) -> None:
    content = json.loads(written[name].read_text("utf-8"))
    validator = Draft202012Validator(schema(name))
    assert not validator.is_valid({**content, "surplus": 1})
    assert not validator.is_valid({**content, "environment": {**content["environment"], "surplus": 1}})
    assert not validator.is_valid({key: value for key, value in content.items() if key != "warnings"})
    assert not validator.is_valid({**content, "schema_version": 2})


def test_schemas_are_made_from_the_dataclasses() -> None:
    """Mended by: python scripts/make_schemas.py"""
    made = runpy.run_path(str(ROOT / "scripts/make_schemas.py"))["schemas"]()
    assert {f"{name}.schema.json" for name in NAMES} == set(made) == {path.name for path in SCHEMAS.iterdir()}
    for name in NAMES:
        assert schema(name) == json.loads(made[f"{name}.schema.json"]), name


def test_every_field_is_documented_and_nothing_else() -> None:
    docs = documented()
    used = {"summary.csv"}
    for name in NAMES:
        root = schema(name)
        assert docs[f"{name}.json"] == list(paths(root, root, docs)), name
        shared = {title.lower(): part for title, part in root["$defs"].items() if title.lower() in docs}
        for heading, part in shared.items():
            assert docs[heading] == list(paths(part, root, docs)), heading
        used |= {f"{name}.json", *shared}
    assert used == set(docs)


@pytest.mark.parametrize("name", ["report", "evaluation"])
def test_what_the_gate_reads_is_a_field(name: str) -> None:
    root, layout = schema(name), LAYOUTS[f"{name}.json"]
    machine = [f"environment.{key}" for key in MACHINE]
    for path in [*layout.same.values(), *layout.figures.values(), *machine]:
        part = root
        for key in path.split("."):
            part = resolved(part, root)
            part = part["properties"][key] if "properties" in part else part["additionalProperties"]


def test_reports_are_read_without_torch() -> None:
    code = "import sys, corp_cli.commands.check, corp_cli.report.schema; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_only_twenty_bad_images_are_named() -> None:
    intake = Intake("x", "y", allowed=100)
    intake.take(0, [f"{i}.png (broken)" for i in range(50)])
    found = image_facts(ImageSet("x", (), ()), intake).bad
    assert found.count == 50
    assert found.first == [f"{i}.png (broken)" for i in range(20)]


@pytest.mark.parametrize("dense", [1, 32, 33, 100, 5120])
def test_a_damage_curve_is_thinned_and_keeps_its_ends(dense: int) -> None:
    damage = torch.linspace(1, 0, dense + 1, dtype=torch.float64)
    blocks = blocks_of(variants.build("deit"))
    found = damage_curve(Curve(1, "mlp", damage), blocks)
    assert found.block == blocks[1].name
    assert len(found.sizes) <= 33
    assert found.sizes[-1] == dense
    assert found.damage == [float(damage[size]) for size in found.sizes]


def test_columns_of_the_summary_are_documented() -> None:
    assert documented()["summary.csv"] == [item.name for item in fields(Row)]


def test_floats_are_rounded_at_every_depth() -> None:
    assert rounded({"a": [1 / 3, {"b": (2e-9 / 3, 5)}], "c": "0.123456789"}) == {
        "a": [0.333333, {"b": [6.66667e-10, 5]}],
        "c": "0.123456789",
    }


# The commit of a checkout


def test_the_processor_has_a_name() -> None:
    assert cpu_name().strip()
    assert cpu_name() is cpu_name()  # found out once


def test_commit_of_a_branch_a_packed_branch_and_a_detached_head(tmp_path: Path) -> None:
    git, commit = tmp_path / ".git", "1" * 40
    assert git_commit(tmp_path) is None
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"{commit}\n")
    assert git_commit(tmp_path) == commit
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(tmp_path) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{'2' * 40} refs/heads/main\n")
    assert git_commit(tmp_path) == "2" * 40
    (git / "refs/heads/main").write_text(f"{'3' * 40}\n")
    assert git_commit(tmp_path) == "3" * 40


def test_commit_of_a_worktree(tmp_path: Path) -> None:
    inside = tmp_path / "repo/.git/worktrees/side"
    inside.mkdir(parents=True)
    (tmp_path / "repo/.git/refs/heads").mkdir(parents=True)
    (tmp_path / "repo/.git/refs/heads/side").write_text(f"{'4' * 40}\n")
    (inside / "HEAD").write_text("ref: refs/heads/side\n")
    (inside / "commondir").write_text("../..\n")
    (tmp_path / "side").mkdir()
    (tmp_path / "side/.git").write_text(f"gitdir: {inside}\n")
    assert git_commit(tmp_path / "side") == "4" * 40
