"""`corp export` and `export.formats`: what is written, that it is the model, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto

from corp_cli.cli.main import main
from corp_cli.config.checkpoints import ExportConfig
from corp_cli.config.export import FORMATS, ExportOptions
from corp_cli.errors import CorpError
from corp_cli.export import formats, onnx_files
from corp_cli.export.formats import runs_of, write_files
from corp_cli.export.onnx_files import OnnxModel
from corp_cli.export.parity import compare
from corp_cli.files.checkpoint import load_pruned
from corp_cli.measure.results import File, Parity
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loaded import LoadedModel
from corp_cli.models.spec import ModelSpec
from corp_cli.models.token_block import spare_tokens
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants
from tests.support.documents import read
from tests.support.tiny import write_shallow
from tests.support.typed import UNTIMED
from tests.support.variants import logits

FEW = ["evaluation.num_workers=0", "evaluation.num_images=100"]
QK_ONLY = frozenset({"mlp", "qk"})  # leaves queries narrower than values

pytestmark = pytest.mark.usefixtures("tiny_digits")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shallow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUNDLED, "vit_digits", write_shallow(folder / "shallow.safetensors"))
        assert main(["prune", *UNTIMED, *FEW, "sparsity.joint=0.25", f"hydra.run.dir={folder}/run"]) == 0
    return folder / "run/pruned.safetensors"


def export(folder: Path, *args: str) -> dict[str, Any]:
    assert main(["export", *FEW, *args, f"hydra.run.dir={folder}"]) == 0
    content: dict[str, Any] = json.loads((folder / "export.json").read_text())
    return content


def made(folder: Path) -> set[str]:
    """What a run wrote, but for its config and its log."""
    return {path.name for path in folder.iterdir() if path.name != ".hydra" and path.suffix != ".log"}


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file, and the same in int8."""
    folder = tmp_path_factory.mktemp("onnx")
    export(folder, f"checkpoint={checkpoint}", "int8=true")
    return folder


def test_onnx_is_the_model_before_and_after_optimisation(exported: Path, checkpoint: Path) -> None:
    content = json.loads((exported / "export.json").read_text())
    whole, small = content["files"]
    assert list(whole["parity"]) == ["none", "onnxruntime", "onnxslim"]
    for found in whole["parity"].values():
        assert found["max_abs_diff"] <= 1e-3
        assert found["agreement"] == 100
        assert found["top1"] == content["pytorch"]["top1"]
    assert content["pytorch"]["top1"] >= 85  # of 100 digits, of which rounding alone moves two
    assert content["images"]["source"] == "digits_test.safetensors"
    assert small["bytes"] < whole["bytes"] / 2
    assert small["parity"]["onnxruntime"]["agreement"] >= 95
    assert (small["quantisation"], whole["quantisation"], whole["opset"]) == ("int8", None, 20)
    assert "onnxruntime" in content["environment"]["versions"]
    assert content["warnings"] == []
    assert made(exported) == {"model.onnx", "model.int8.onnx", "export.json"}
    report = json.loads((checkpoint.parent / "report.json").read_text())
    assert content["pytorch"]["top1"] == report["evaluation"]["pruned"]["top1"]


def test_onnx_takes_any_batch_and_holds_no_padding_and_no_paths(exported: Path, checkpoint: Path) -> None:
    proto = onnx.load(exported / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert "Pad" not in {node.op_type for node in proto.graph.node}
    assert [entry.version for entry in proto.opset_import if not entry.domain] == [20]
    assert str(formats.__file__).encode() not in proto.SerializeToString()
    about = {entry.key: entry.value for entry in proto.metadata_props}
    assert json.loads(about["preprocessing"])["mean"] == [0.5]
    file, model = OnnxModel(exported / "model.onnx"), load_pruned(checkpoint)
    for batch in (1, 5):
        x = torch.randn(batch, 1, 8, 8)
        torch.testing.assert_close(file(x), logits(model, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("dtype", "stored"), [("float16", TensorProto.FLOAT16), ("bfloat16", TensorProto.BFLOAT16)])
def test_onnx_weights_of_half_the_size(dtype: str, stored: int, tmp_path: Path) -> None:
    source, x = source_of("vit"), variants.images("vit", 4)
    (file,) = write_files(source, ExportOptions(["onnx"], dtype, opset=18), tmp_path)
    weights = [tensor for tensor in onnx.load(file.path).graph.initializer if len(tensor.dims) > 1]
    assert {tensor.data_type for tensor in weights} == {stored}
    expected = logits(source.model, x)
    for run in file.runs.values():
        found = run(x)
        assert found.dtype == torch.float32
        assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["torchexport", "torchscript", "timm"])
def test_other_formats(name: str, dtype: str, checkpoint: Path, tmp_path: Path) -> None:
    found = export(tmp_path, f"checkpoint={checkpoint}", f"format={name}", f"dtype={dtype}")
    (file,) = found["files"]
    assert (file["format"], file["dtype"], file["opset"]) == (name, dtype, None)
    assert file["parity"]["none"]["max_abs_diff"] <= (1e-4 if dtype == "float32" else 0.2)
    assert file["parity"]["none"]["agreement"] >= (100 if dtype == "float32" else 98)
    assert made(tmp_path) == {file["file"], "export.json"}


@pytest.mark.parametrize("name", ["torchscript", "timm"])
def test_what_is_there_already_is_replaced(name: str, checkpoint: Path, tmp_path: Path) -> None:
    files = [export(tmp_path, f"checkpoint={checkpoint}", f"format={name}")["files"] for _ in range(2)]
    parity = [file.pop("parity")["none"] for (file,) in files]
    assert files[0] == files[1]
    assert all(found["max_abs_diff"] <= 1e-4 for found in parity)


def test_dense_model_on_random_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["model.name=vit_tiny_patch16_224", "model.pretrained=false", "+model.args={depth:1,img_size:32}"]
    found = export(tmp_path, *model, "format=torchscript", "evaluation.throughput_batches=1")
    assert found["images"]["source"] == "random images"
    assert found["images"]["labelled_images"] == 0
    assert found["model"]["dense_sha256"] is None
    assert found["files"][0]["parity"]["none"]["top1"] is None
    assert list(found["throughput"]["images_per_second"]) == ["pytorch", "model.ts, none"]
    assert "Compared on 64 images: random images." in capsys.readouterr().out


# --- architectures --------------------------------------------------------------------------------------------


def source_of(variant: str, unread: bool = False) -> LoadedModel:
    """A pruned variant, its queries narrower than its values."""
    model, (name, args) = variants.build(variant), variants.arguments(variant)
    pruned = prune_half(model, variants.images(variant), (QK_ONLY & allowed(variant)) or allowed(variant)).eval()
    if unread:
        spare_tokens(pruned, (), 1)
    size = args["img_size"]
    return LoadedModel(variant, pruned, ModelSpec(name, args, {"input_size": [args.get("in_chans", 3), size, size]}))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["siglip_attention_pool", "swiglu"])
def test_architectures_as_onnx(variant: str, tmp_path: Path) -> None:
    check(source_of(variant), variant, tmp_path, ["onnx"])


@pytest.mark.parametrize("variant", ["rope_mixed", "sam", "swinv2"])
def test_architectures_as_torchscript(variant: str, tmp_path: Path) -> None:
    check(source_of(variant), variant, tmp_path, ["torchscript"])


def test_a_last_block_without_unread_tokens(tmp_path: Path) -> None:
    check(source_of("vit", unread=True), "vit", tmp_path, ["onnx", "torchexport", "torchscript"])


def test_a_model_that_merges_tokens(tmp_path: Path) -> None:
    source = source_of("vit")
    spare_tokens(source.model, (2, 0), 1)
    check(source, "vit", tmp_path, ["onnx", "torchexport", "torchscript"])


def check(source: LoadedModel, variant: str, folder: Path, names: list[str]) -> None:
    """Every file gives the logits of the model, for any batch."""
    files = write_files(source, ExportOptions(names), folder)
    batches = [(variants.images(variant, count), torch.full((count,), -1)) for count in (3, 4)]
    _, parity = compare(source.model, runs_of(files), batches)
    assert len(parity) >= len(names)
    for found in parity.values():
        assert found.max_abs_diff < 1e-4
        assert found.agreement == 100


def test_large_models_have_their_weights_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_files, "LIMIT", 1000)
    source, second = source_of("vit"), tmp_path / "model.onnx.data"
    check(source, "vit", tmp_path, ["onnx"])
    whole = second.stat().st_size
    assert whole > (tmp_path / "model.onnx").stat().st_size
    write_files(source, ExportOptions(["onnx"], "bfloat16"), tmp_path)
    assert second.stat().st_size < 0.6 * whole


# --- export.formats -------------------------------------------------------------------------------------------


def test_prune_writes_the_formats_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", *UNTIMED, "export.formats=[timm,torchscript]", f"hydra.run.dir={tmp_path}"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [file["file"] for file in report["export"]] == ["timm", "model.ts"]
    assert report["export"][0]["parity"]["none"]["max_abs_diff"] == 0
    assert report["export"][1]["parity"]["none"]["agreement"] == 100
    assert (tmp_path / "timm/config.json").is_file()
    assert "Wrote pruned.safetensors, timm, model.ts, report.json" in capsys.readouterr().out


def test_prune_keeps_its_result_where_the_export_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setitem(formats.WRITERS, "torchscript", fails)
    assert main(["prune", *UNTIMED, "export.formats=[torchscript]", f"hydra.run.dir={tmp_path}"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["export"] == []
    assert any("cannot be exported as torchscript (no such operator)" in warning for warning in report["warnings"])
    assert (tmp_path / "pruned.safetensors").is_file()
    assert not (tmp_path / formats.SCRATCH).exists()


# --- what is refused ------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ("onnxruntime", "onnxslim")
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name in missing else object())
    said = "corp: The format onnx needs packages that are not installed; run: pip install onnxruntime onnxslim\n"
    for argv in (["export", "model=vit_digits"], ["prune", *UNTIMED, "export.formats=[onnx]"]):
        assert main([*argv, f"hydra.run.dir={tmp_path}/out"]) == 2
        assert capsys.readouterr().err == said
        assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(CorpError, match=r"needs torch 2\.6 or newer, and this is 2\.4\.1"):
        formats.require_packages(ExportOptions(["onnx"]))


def test_nothing_stays_behind_where_an_export_fails(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such operator\nmore")

    monkeypatch.setitem(formats.WRITERS, "torchscript", fails)
    args = ["export", f"checkpoint={checkpoint}", "format=torchscript", f"hydra.run.dir={tmp_path}/out"]
    assert main(args) == 2
    assert "cannot be exported as torchscript (no such operator); try another format." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dense_model_is_in_timm_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "model=vit_digits", "format=timm", f"hydra.run.dir={tmp_path}/out"]) == 2
    assert "timm has vit_tiny_patch16_224 already" in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_not_replaced(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["export", *FEW, f"checkpoint={checkpoint}", "format=timm", f"hydra.run.dir={tmp_path}"]
    for _ in range(2):  # its own it writes again
        assert main(argv) == 0
    (tmp_path / "timm/notes.txt").write_text("mine")
    assert main(argv) == 2
    assert "holds notes.txt, which corp did not write" in capsys.readouterr().err
    assert (tmp_path / "timm/notes.txt").read_text() == "mine"


def test_a_file_that_is_not_the_model_is_said_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    file = File("model.onnx", None, "onnx", "float32", None, 20, 1, {"none": Parity(0.5, agreement=None, kl=None)})
    formats.warn_apart([file, replace(file, quantisation="int8"), replace(file, dtype="float16")])
    assert capsys.readouterr().err.count("model.onnx gives other logits than PyTorch, by up to 0.5") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({}, "Say what to export"),
        ({"checkpoint": "a", "format": "tflite"}, f"format=tflite is not a choice; use one of {', '.join(FORMATS)}."),
        ({"checkpoint": "a", "dtype": "int4"}, "dtype=int4 is not a choice; use one of float32, float16, bfloat16."),
        ({"checkpoint": "a", "opset": 11}, "opset=11 is out of range; it must be from 18 to 23."),
        ({"checkpoint": "a", "int8": True, "format": "timm"}, "int8=true quantises an ONNX file"),
        ({"checkpoint": "a", "int8": True, "dtype": "float16"}, "int8=true quantises float32 weights"),
    ],
)
def test_choices_that_do_not_go_together(args: dict[str, Any], said: str) -> None:
    with pytest.raises(CorpError) as caught:
        ExportConfig(**args)
    assert str(caught.value).startswith(said)
    if "format" in args and args["format"] == "tflite":
        with pytest.raises(CorpError, match=r"export\.formats=tflite is not a choice"):
            ExportOptions(["tflite"])


def test_bundled_images_are_found_by_what_the_model_takes() -> None:
    from corp_cli.commands.export import bundled_model

    digits = BUNDLED["vit_digits"]
    assert bundled_model(ModelSpec(digits.timm_name, {}, digits.data)) is digits
    assert bundled_model(ModelSpec(digits.timm_name, {}, {**digits.data, "mean": [0.4]})) is None


def test_the_guide_shows_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name in ("onnxruntime", "onnxslim") else object())
    said = re.findall(
        r"^```bash\n(corp [^\n]*)\n```\n\n```text\n(corp: [^`]*?)```$", read("docs/export.md"), re.MULTILINE
    )
    assert len(said) == 2
    for command, message in said:
        assert main([*command.split()[1:], f"hydra.run.dir={tmp_path}/out"]) == 2
        assert capsys.readouterr().err == message
