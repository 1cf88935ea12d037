"""Weights and arguments from strangers: none runs code, opens another file, goes to the network or ends in a trace."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub.utils import LocalEntryNotFoundError  # type: ignore[attr-defined]  # its old and new place

import corp_cli
from corp_cli.cli.main import main
from corp_cli.commands import info
from corp_cli.config.checkpoints import InfoConfig
from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.export.timm_entry import write_config
from corp_cli.files.checkpoint import load_pruned
from corp_cli.files.manifest import read_manifest
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import architecture_args, build, load_dense
from corp_cli.models.spec import LOADING_ARGS, ModelSpec
from corp_cli.runtime import hub
from tests.faults.untrusted import DATA, VIT, evil, with_args
from tests.support import variants
from tests.support.variants import logits


def test_the_bait_works(tmp_path: Path) -> None:
    torch.load(evil(tmp_path / "canary"), weights_only=False)
    assert (tmp_path / "canary").exists()


# --- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zip", "old", "text"])
@pytest.mark.parametrize("name", ["evil.pth", "evil.bin", "evil.safetensors"])
def test_a_pickle_as_checkpoint(canary: Path, name: str, kind: str) -> None:
    with pytest.raises(
        CorpError, match=r"could run code|not a PyTorch|not a whole safetensors|PyTorch file by content"
    ):
        load_dense(ModelConfig(VIT, checkpoint=str(evil(canary, name, kind))))


def timm_folder(folder: Path, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"architecture": VIT, "num_classes": 7, "model_args": variants.arguments("vit")[1], **more}
    about: dict[str, Any] = {"num_classes": 7, "input_size": [3, 32, 32], "mean": [0.1] * 3}
    about |= {"classifier": "head", "first_conv": "patch_embed.proj"}
    (folder / "config.json").write_text(json.dumps({"pretrained_cfg": about, **config}))
    return folder


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pth", "model.safetensors"])
def test_a_pickle_in_a_folder_of_timm(canary: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = timm_folder(canary.parent / "folder")
    evil(canary, f"folder/{file}")
    images = f"calibration.path={BUNDLED['vit_digits'].calibration}"
    assert main(["prune", f"model.name=local-dir:{folder}", images, f"hydra.run.dir={canary.parent}/run"]) == 2
    assert re.search("could run code|PyTorch file by content", capsys.readouterr().err)


def test_a_pickle_in_a_folder_of_transformers(canary: Path) -> None:
    evil(canary, "folder/pytorch_model.bin")
    (canary.parent / "folder/config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CorpError, match="could run code"):
        load_dense(ModelConfig(f"transformers:{canary.parent}/folder"))


def test_a_pickle_on_the_hub(canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = timm_folder(canary.parent / "folder")
    evil(canary, "folder/pytorch_model.bin")

    def download(repo_id: str, filename: str, **_: object) -> str:
        if not (folder / filename).exists():
            raise LocalEntryNotFoundError(filename)
        return str(folder / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    monkeypatch.setattr(hub, "unreachable", lambda url: None)
    with pytest.raises(CorpError, match=r"cannot be fetched \(RuntimeError: weights_only=True blocked"):
        load_dense(ModelConfig("hf-hub:some/model"))


def test_weights_in_a_folder_of_timm_are_placed_by_timm(canary: Path) -> None:
    model, folder = variants.build("vit"), timm_folder(canary.parent / "folder")
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state}, folder / "pytorch_model.bin")
    found, spec = load_dense(ModelConfig(f"local-dir:{folder}"))
    x = variants.images("vit")
    torch.testing.assert_close(logits(found, x), logits(model, x))
    assert (spec.name, spec.args["embed_dim"], spec.data["mean"]) == (VIT, 32, [0.1] * 3)
    assert "state_dict" not in found.pretrained_cfg  # type: ignore[operator]
    # another number of classes and of channels: timm's own adaptation, as for its own pretrained weights
    other, spec = load_dense(ModelConfig(f"local-dir:{folder}", args={"num_classes": 3, "in_chans": 1}))
    assert spec.args["num_classes"] == 3
    name = "patch_embed.proj.weight"
    torch.testing.assert_close(other.get_parameter(name), model.get_parameter(name).sum(1, keepdim=True))
    del state["module.norm.weight"]
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(CorpError, match=r"cannot be built: .*norm\.weight"):
        load_dense(ModelConfig(f"local-dir:{folder}"))
    random, _ = load_dense(ModelConfig(f"local-dir:{folder}", pretrained=False))
    assert not torch.equal(random.get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "no config.json that timm wrote"),
        ("[1]", "no config.json that timm wrote"),
        ("{", "no config.json that timm wrote"),
        ('{"architecture": "corp_pruned"}', "neither a bundled model nor a timm model|needs checkpoint=FILE"),
        (
            '{"architecture": "' + VIT + '", "pretrained_cfg": {}, "model_args": {"pretrained_strict": 0}}',
            r"args\.pretrained_strict",
        ),
        ('{"architecture": "' + VIT + '", "pretrained_cfg": {"file": "evil.pth"}}', "holds no weights"),
    ],
)
def test_a_folder_of_timm_that_is_none(canary: Path, text: str | None, sentence: str) -> None:
    evil(canary, "evil.pth")
    folder = canary.parent / "folder"
    folder.mkdir()
    if text is not None:
        (folder / "config.json").write_text(text)
    needs_weights = "holds" in sentence
    with pytest.raises(CorpError, match=sentence):
        load_dense(ModelConfig(f"local-dir:{folder}", pretrained=needs_weights))


# --- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_arguments_of_architectures_are_known(variant: str) -> None:
    name, args = variants.arguments(variant)
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")  # one of the oldest versions allowed
    assert args.keys() | {"num_classes", "drop_path_rate"} <= architecture_args(name)
    build(name, args)


def test_what_loads_is_no_argument_of_an_architecture() -> None:
    takers = (timm.create_model, timm.models.build_model_with_cfg)
    taken = {name for taker in takers for name in inspect.signature(taker).parameters}
    assert taken - {"kwargs"} <= LOADING_ARGS


@pytest.mark.parametrize("key", sorted(LOADING_ARGS - {"model_name"}))
def test_arguments_that_load_are_refused(
    canary: Path, sound: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = str(evil(canary))
    with pytest.raises(CorpError, match=rf"cannot be built with model\.args\.{key}"):
        load_dense(ModelConfig(VIT, pretrained=False, args={**variants.arguments("vit")[1], key: value}))
    bad = with_args(sound, canary.parent / "bad.safetensors", **{key: value})
    for read in (read_manifest, load_pruned, lambda path: info.run(InfoConfig(str(path)), Path())):
        with pytest.raises(CorpError, match=f"the argument {key} is not one of an architecture"):
            read(bad)


def test_every_door_to_a_manifest(canary: Path, sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corp_cli.register()
    folder = canary.parent / "folder"
    folder.mkdir()
    bad = with_args(sound, folder / "model.safetensors", checkpoint_path=str(evil(canary)))
    write_config(ModelSpec(VIT, {"num_classes": 7}, DATA), folder)
    with pytest.raises(CorpError, match="the argument checkpoint_path"):
        timm.create_model("corp_pruned", checkpoint=bad)
    for pretrained in (False, True):
        with pytest.raises(CorpError, match="the argument checkpoint_path"):
            timm.create_model(f"local-dir:{folder}", pretrained=pretrained)
    for command in ("info", "evaluate", "bench", "export"):
        where = [] if command == "info" else [f"hydra.run.dir={canary.parent}/{command}"]
        where += ["format=torchscript"] if command == "export" else []
        assert main([command, f"checkpoint={bad}", *where]) == 2
        assert "the argument checkpoint_path" in capsys.readouterr().err


def test_a_config_json_cannot_bring_arguments_that_load(canary: Path, sound: Path) -> None:
    corp_cli.register()
    folder = canary.parent / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(sound.read_bytes())
    config = {"architecture": "corp_pruned", "model_args": {"checkpoint_path": str(evil(canary))}, "pretrained_cfg": {}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorpError, match=r"model\.args\.checkpoint_path"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_a_misspelt_argument_gets_the_right_one() -> None:
    with pytest.raises(CorpError, match=r"model\.args\.embed_dims.*did you mean embed_dim\?"):
        load_dense(ModelConfig(VIT, pretrained=False, args={"embed_dims": 32}))


def test_an_entry_of_the_users_own_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(pretrained_cfg_overlay: None = None, cache_dir: None = None, **kwargs: Any) -> Any:
        return timm.create_model(VIT, **kwargs)

    entry.__module__ = "string"  # one that holds no class of a model
    monkeypatch.setitem(timm.models._registry._model_entrypoints, "my_own_vit", entry)
    model, spec = load_dense(ModelConfig("my_own_vit", pretrained=False, args=variants.arguments("vit")[1]))
    assert (spec.name, len(list(model.get_submodule("blocks").children()))) == ("my_own_vit", 2)
