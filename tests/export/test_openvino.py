"""OpenVINO's files: the same logits, names and sizes, weights of half the size, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corp_cli.cli.main import main
from corp_cli.config.checkpoints import ExportConfig
from corp_cli.config.export import ExportOptions
from corp_cli.errors import CorpError
from corp_cli.export import formats
from corp_cli.export.formats import write_files
from corp_cli.export.openvino_files import OpenvinoModel
from corp_cli.models.token_block import spare_tokens
from tests.export.test_export import check, export, made, source_of
from tests.support import variants
from tests.support.typed import UNTIMED
from tests.support.variants import logits

ROOT = Path(__file__).parents[2]


@pytest.fixture
def openvino() -> Any:
    return pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")


@pytest.mark.usefixtures("tiny_digits")
def test_the_file_is_the_model(openvino: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = export(tmp_path, "model=vit_digits", "format=openvino")
    assert f"Wrote model.xml, model.bin and export.json to {tmp_path}." in capsys.readouterr().out
    (file,) = found["files"]
    assert file["weights"] == "model.bin"
    assert (file["file"], file["format"], file["opset"]) == ("model.xml", "openvino", None)
    assert file["bytes"] == sum((tmp_path / name).stat().st_size for name in ("model.xml", "model.bin"))
    assert file["parity"]["openvino"]["max_abs_diff"] <= 1e-3
    assert file["parity"]["openvino"]["agreement"] == 100
    assert file["parity"]["openvino"]["top1"] == found["pytorch"]["top1"]
    assert made(tmp_path) == {"model.xml", "model.bin", "export.json"}
    assert "openvino" in found["environment"]["versions"]
    assert found["warnings"] == []
    read = openvino.Core().read_model(tmp_path / "model.xml")
    assert (read.input(0).any_name, read.output(0).any_name) == ("images", "logits")
    assert str(read.input(0).partial_shape) == "[?,1,8,8]"
    assert json.loads(read.get_rt_info(["framework", "preprocessing"]).value)["mean"] == [0.5]
    assert str(tmp_path) not in (tmp_path / "model.xml").read_text()


@pytest.mark.parametrize("variant", ["vit", pytest.param("swinv2", marks=pytest.mark.slow)])
def test_architectures(openvino: Any, variant: str, tmp_path: Path) -> None:
    check(source_of(variant), variant, tmp_path, ["openvino"])


def test_a_model_that_merges_tokens(openvino: Any, tmp_path: Path) -> None:
    source = source_of("vit", unread=True)
    spare_tokens(source.model, (2, 0), 1)
    check(source, "vit", tmp_path, ["openvino"])


def test_weights_of_half_the_size(openvino: Any, tmp_path: Path) -> None:
    source, x, sizes = source_of("vit"), variants.images("vit", 4), []
    for dtype in ("float32", "float16"):
        (file,) = write_files(source, ExportOptions("openvino", dtype), tmp_path)
        sizes.append((tmp_path / "model.bin").stat().st_size)
        furthest = (OpenvinoModel(file.path)(x) - logits(source.model, x)).abs().max()
        assert furthest < (1e-4 if dtype == "float32" else 0.02)
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.slow
def test_ctrl_c_is_no_crash_when_files_have_been_run(openvino: Any, tmp_path: Path) -> None:
    """In a process of its own, which a stack for signals that is gone would end."""
    source = source_of("vit")
    write_files(source, ExportOptions(["openvino"]), tmp_path)
    script = (
        "import os, signal, sys, torch\n"
        "from corp_cli.export.openvino_files import OpenvinoModel\n"
        "from tests.support import variants\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for _ in range(2):\n"
        "    first = OpenvinoModel(sys.argv[1])\n"
        "    second = OpenvinoModel(sys.argv[1])\n"
        "    second(variants.images('vit', 2))\n"
        "    del first, second\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "model.xml")]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.slow
def test_beside_onnx_at_the_end_of_a_run(openvino: Any, tmp_path: Path) -> None:
    args = ["compensation.mlp=affine", "export.formats=[onnx,openvino]", f"hydra.run.dir={tmp_path}"]
    assert main(["prune", *UNTIMED, *args]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [file["file"] for file in report["export"]] == ["model.onnx", "model.xml"]
    assert {"model.onnx", "model.xml", "model.bin"} <= made(tmp_path)
    assert not (tmp_path / formats.SCRATCH).exists()


def test_a_static_int8_file_runs_in_openvino(openvino: Any, tmp_path: Path) -> None:
    """As docs/deployment.md says: its rounding is in the file, so that it gives what ONNX Runtime gives."""
    x = variants.images("vit", 32)
    files = write_files(source_of("vit"), ExportOptions("onnx", int8="static"), tmp_path, lambda: [x])
    expected, found = logits(source_of("vit").model, x), OpenvinoModel(files[1].path)(x)
    assert (found - expected).abs().max() > 0  # by how much depends on the CPU: sums of int8 saturate on some
    assert (found - files[1].runs["onnxruntime"](x)).abs().max() < 0.02 * expected.abs().max()


def test_a_missing_openvino_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "openvino" else object())
    assert main(["export", "model=vit_digits", "format=openvino", f"hydra.run.dir={tmp_path}/out"]) == 2
    said = "corp: The format openvino needs packages that are not installed; run: pip install openvino\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "out").exists()


def test_bfloat16_is_refused() -> None:
    with pytest.raises(CorpError, match="dtype=bfloat16 is no format of OpenVINO's weights; use float16"):
        ExportConfig(checkpoint="a", format="openvino", dtype="bfloat16")
