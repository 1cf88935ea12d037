"""`corp doctor`: what it finds, what it says of what is broken, and its exit code. No test needs the network."""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from corp_cli.cli.main import main
from corp_cli.commands import doctor
from corp_cli.commands.doctor import Check

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with a hub that answers, and a CPU device as the self-test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "unreachable", lambda url: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """name → state, of the lines shown."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {words[1]: words[0] for words in lines if words[0] in doctor.STYLES}


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.endswith("corp can work here.\n")
    assert "problem" not in said.out
    known = "Python" if doctor.version_of("corp-cli") else "versions"  # run from its sources, its ranges are not known
    for name in ("corp", known, "torch", "torchvision", "timm", "CPU", "memory", "output", "hub", "self-test"):
        assert f" {name} " in said.out
    assert not list(tmp_path.iterdir())


def test_what_is_broken_ends_in_one_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Check]:
        raise ImportError("no such symbol\nsecond line")

    bad = Check("torch", "problem", "2.1.0 (needs >=2.4)", "pip install 'torch>=2.4'")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([bad]), broken))
    assert main(["doctor"]) == 2
    said = capsys.readouterr()
    assert "problem  torch        2.1.0 (needs >=2.4); pip install 'torch>=2.4'\n" in said.out
    assert "problem  broken       cannot be checked (no such symbol); install corp and torch anew\n" in said.out
    assert said.err == "corp: Something that corp needs is broken: torch, broken; see what the lines above advise.\n"


@pytest.mark.parametrize(
    ("installed", "state", "found"),
    [
        ("1.0.16", "ok", "1.0.16 (needs <2,>=1.0.16)"),
        ("1.0.9", "problem", "1.0.9 (needs <2,>=1.0.16)"),
        ("2.0.0rc1", "problem", "2.0.0rc1 (needs <2,>=1.0.16)"),
        (None, "problem", "is not installed"),
    ],
)
def test_version_of_a_package(installed: str | None, state: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: installed)
    check = doctor.check_package(Requirement("timm>=1.0.16,<2"), "problem")
    assert (check.state, check.found) == (state, found)
    assert check.advice == ("" if state == "ok" else "pip install 'timm<2,>=1.0.16'")


def test_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [Requirement(f"{name}; extra == 'export'") for name in ("onnx>=1.17", "onnxslim>=0.1")]
    needed.append(Requirement("pytest>=8; extra == 'dev'"))
    monkeypatch.setattr(doctor, "version_of", {"onnx": "1.18", "onnxslim": "0.2"}.get)
    assert doctor.check_extra("export", needed) == Check("export", "ok", "optional: onnx 1.18, onnxslim 0.2")
    monkeypatch.setattr(doctor, "version_of", {"onnx": "1.18"}.get)
    lacking = Check("export", "note", "optional: lacks onnxslim", "pip install 'onnxslim>=0.1'")
    assert doctor.check_extra("export", needed) == lacking


def test_not_installed_as_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    assert [check.state for check in doctor.check_versions()] == ["ok", "note"]


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    (check,) = doctor.check_imports()
    assert (check.name, check.state) == ("timm", "problem")


def test_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (100.0, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    (check,) = doctor.check_processor()
    assert check.state == "note"
    assert "OMP_NUM_THREADS=1" in check.advice
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (check,) = doctor.check_processor()
    assert check.state == "ok"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((70 if index else 1) * 2**30, 80 * 2**30))
    first, second = doctor.check_devices()
    assert first == Check("cuda:0", "note", "card 0, 1.0 of 80.0 GiB free", "close what uses it")
    assert second == Check("cuda:1", "ok", "card 1, 70.0 of 80.0 GiB free")


def test_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 3 * 2**20))
    (check,) = doctor.check_disk()
    assert (check.state, check.advice) == ("note", "make room, or set hydra.run.dir to another folder")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, 0))
    (check,) = doctor.check_disk()
    assert check.state == "problem"
    assert "has 0 MiB left" in check.found


def test_hub_out_of_reach_is_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "unreachable", lambda url: "no route to host")
    assert main(["doctor"]) == 0
    assert states(capsys)["hub"] == "note"
    *_, hub = doctor.check_hub()
    assert "out of reach (no route to host)" in hub.found
    assert "model.checkpoint=FILE" in hub.advice


def test_hub_is_not_asked_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "unreachable", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    *_, hub = doctor.check_hub()
    assert hub.state == "note"
    assert "HF_HUB_OFFLINE" in hub.found


def test_hub_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    cache, _ = doctor.check_hub()
    assert (cache.state, cache.advice) == ("note", "set HF_HOME to a folder")


def test_the_endpoint_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(doctor, "unreachable", asked.append)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    list(doctor.check_hub())
    assert asked == ["https://hub.example"]


def test_self_test_notices_a_broken_model(monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = doctor.check_itself()
    assert check.state == "ok"
    monkeypatch.setattr(torch.Tensor, "argmax", lambda logits, dim: torch.zeros(len(logits)))
    (check,) = doctor.check_itself()
    assert check.state == "problem"
    assert "of 64 digits" in check.found


@pytest.mark.parametrize("argv", [["foo=1"], ["foo"], ["-m"], ["+foo=1"]])
def test_it_takes_no_keys(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert capsys.readouterr().err.startswith("corp: ")
    assert not list(tmp_path.iterdir())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "Usage: corp doctor" in capsys.readouterr().out
