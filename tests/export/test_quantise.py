"""int8: what is rounded and what is not, by ranges of which images, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from corp_cli.cli.main import main
from corp_cli.config.checkpoints import ExportConfig
from corp_cli.config.export import ExportOptions
from corp_cli.config.prune import ModelConfig, PruneConfig
from corp_cli.export.formats import Written, write_files
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loaded import dense_model
from tests.export.test_export import FEW, export, made, source_of
from tests.support import variants
from tests.support.typed import UNTIMED
from tests.support.variants import logits

DIGITS = BUNDLED["vit_digits"]
DENSE = ["model=vit_digits", "evaluation.num_workers=0", "calibration.num_workers=0"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Written]:
    """The float32 file of a pruned model, and both in int8."""
    folder = tmp_path_factory.mktemp("int8")
    images = variants.images("vit", 32)
    return write_files(source_of("vit"), ExportOptions(["onnx"], int8="both"), folder, lambda: images.split(8))


def test_static_rounds_what_goes_into_layers_with_weights_and_nothing_else(written: list[Written]) -> None:
    graph = onnx.load(written[2].path).graph
    maker = {name: node for node in graph.node for name in node.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    linear, free = [], []
    for node in graph.node:
        rounded = [maker[name].op_type == "DequantizeLinear" for name in node.input[:2] if name in maker]
        if node.op_type in ("MatMul", "Gemm") and all(rounded) and len(rounded) == 2:
            linear.append(node)
        elif node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            free.append(node)
            assert not any(rounded), node.name
    assert len(linear) == 4 * 2 + 1  # qkv, proj, fc1 and fc2 of two blocks, and the head
    assert {"MatMul", "Softmax", "LayerNormalization", "Gelu", "Conv"} <= {node.op_type for node in free}
    for node in linear:
        weight, scale, _ = maker[node.input[1]].input
        assert weights[weight].data_type == TensorProto.INT8
        width = weights[weight].dims[0 if node.op_type == "Gemm" else 1]
        assert list(weights[scale].dims) == [width]  # one scale for every output
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == len(linear)


def test_static_ranges_are_those_of_the_images(written: list[Written]) -> None:
    check_first_range(written[2].path, source_of("vit").model, variants.images("vit", 32))


def check_first_range(path: Path, model: nn.Module, images: Tensor) -> None:
    """Of what the first layer sees, from its least to its largest value over all images, in 255 steps."""
    seen: list[Tensor] = []
    block: Any = model.get_submodule("blocks.0")
    block.attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(model, images)
    graph = onnx.load(path).graph
    first = next(node for node in graph.node if node.op_type == "QuantizeLinear")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    scale, zero = float(constants[first.input[1]]), int(constants[first.input[2]])
    low, high = float(seen[0].min()), float(seen[0].max())
    assert scale == pytest.approx((high - low) / 255, rel=1e-4)
    assert zero == pytest.approx(-low / scale, abs=0.51)


def test_both_are_close_to_the_model_for_any_batch(written: list[Written]) -> None:
    model, images = source_of("vit").model, variants.images("vit", 5)
    assert [file.path.name for file in written] == ["model.onnx", "model.int8.onnx", "model.int8.static.onnx"]
    assert [file.quantisation for file in written] == [None, "int8", "int8_static"]
    for file in written[1:]:
        for x in (images, images[:1]):
            expected = logits(model, x)
            furthest = (file.runs["onnxruntime"](x) - expected).abs().max()
            assert 0 < furthest < 0.1 * expected.abs().max()


# --- the commands ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_digits_model_is_calibrated_on_its_own_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = export(tmp_path, *DENSE, "int8=static", "calibration.num_images=64")
    whole, small = found["files"]
    assert made(tmp_path) == {"model.onnx", "model.int8.static.onnx", "export.json"}
    assert (found["calibration"]["source"], found["calibration"]["images"]) == ("digits_train.safetensors", 64)
    assert found["images"]["source"] == "digits_test.safetensors"
    assert found["warnings"] == []
    assert small["bytes"] < whole["bytes"] / 2
    parity = small["parity"]["onnxruntime"]
    assert parity["agreement"] >= 98
    assert parity["top1"] == pytest.approx(found["pytorch"]["top1"], abs=2)
    assert 1e-3 < parity["max_abs_diff"] < 1
    assert "Ranges of static int8 measured on 64 images: digits_train.safetensors." in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_digits")
def test_ranges_are_those_of_calibration_path_as_corp_prepares_it(tmp_path: Path) -> None:
    """Black images, which the model sees as -1."""
    save_file({"images": torch.zeros(16, 8, 8, dtype=torch.uint8)}, tmp_path / "black.safetensors")
    found = export(tmp_path / "out", *DENSE, "int8=static", f"calibration.path={tmp_path}/black.safetensors")
    assert found["calibration"]["images"] == 16
    path, model = tmp_path / "out/model.int8.static.onnx", dense_model(ModelConfig()).model
    check_first_range(path, model, -torch.ones(1, 1, 8, 8))


@pytest.mark.usefixtures("tiny_digits")
def test_images_to_judge_on_are_the_last_resort(tmp_path: Path) -> None:
    images = load_file(DIGITS.evaluation)["images"][:40]
    save_file({"images": images}, tmp_path / "val.safetensors")
    found = export(tmp_path / "out", *DENSE, "int8=static", f"evaluation.path={tmp_path}/val.safetensors")
    assert found["calibration"]["list_sha256"] == found["images"]["list_sha256"]
    assert any("on images that its file is then judged on" in warning for warning in found["warnings"])


def test_random_images_are_refused_and_nothing_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["model.name=vit_tiny_patch16_224", "model.pretrained=false", "+model.args={depth:1,img_size:32}"]
    assert main(["export", *FEW, *model, "int8=both", f"hydra.run.dir={tmp_path}/out"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("corp: int8=both measures ranges of activations on images like those in use")
    assert "set calibration.path" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_prune_calibrates_on_its_calibration_images(tmp_path: Path) -> None:
    args = ["export.formats=onnx", "export.int8=static", "export.int8_images=32", f"hydra.run.dir={tmp_path}"]
    assert main(["prune", *UNTIMED, "compensation.mlp=affine", *args]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [file["quantisation"] for file in report["export"]] == [None, "int8_static"]
    assert report["export"][1]["parity"]["onnxruntime"]["agreement"] >= 95
    assert report["warnings"] == []
    assert (tmp_path / "model.int8.static.onnx").is_file()


def test_true_and_false_mean_what_they_did() -> None:
    for given, meant in ((True, "dynamic"), (False, "none"), ("both", "both")):
        assert ExportConfig(checkpoint="a", int8=given).options().int8 == meant
        assert ExportOptions(["onnx"], int8=given).int8 == meant
    assert ExportConfig(checkpoint="a").int8 == PruneConfig().export.int8 == "none"
