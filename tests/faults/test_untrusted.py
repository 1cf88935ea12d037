"""Files from strangers: none of them runs code, opens another file, goes to the network or ends in a traceback."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub.utils import LocalEntryNotFoundError  # type: ignore[attr-defined]  # its old and new place
from safetensors.torch import load_file, save_file

import corp_cli
from corp_cli.cli.main import main
from corp_cli.commands import info
from corp_cli.config.prune import InfoConfig, ModelConfig
from corp_cli.errors import CorpError
from corp_cli.export.timm_entry import write_config
from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.files.manifest import FORMAT, read_manifest
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.loading import architecture_args, build, load_dense
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import LOADING_ARGS, Manifest, ModelSpec
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants
from tests.support.variants import logits

DATA: dict[str, Any] = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic"}
VIT = "vit_tiny_patch16_224"


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.mkdir, (self.canary,)  # type: ignore[return-value]


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What an unpickled Evil would leave behind; no test may, and none may open a connection."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def evil(canary: Path, name: str = "evil.pth", kind: str = "zip") -> Path:
    """A file of weights that runs code where it is unpickled, as torch.save writes it, as it once did, or as text."""
    path, state = canary.parent / name, {"head.weight": torch.zeros(1), "x": Evil(canary)}
    path.parent.mkdir(exist_ok=True)
    if kind == "text":
        path.write_bytes(pickle.dumps(Evil(canary), protocol=0))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    return path


def test_the_bait_works(tmp_path: Path) -> None:
    torch.load(evil(tmp_path / "canary"), weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pruned checkpoint."""
    path = tmp_path_factory.mktemp("sound") / "pruned.safetensors"
    dense, (name, args) = variants.build("vit"), variants.arguments("vit")
    pruned = prune_half(dense, variants.images("vit"), allowed("vit"))
    recipe = {"recipe": "best", "sparsity": {"mlp": 0.5}}
    spec = ModelSpec(name, args, DATA)
    write_checkpoint(pruned, Manifest(spec, pruned_sizes(pruned, dense), recipe, "0" * 64, {"timm": "1"}), path)
    return path


def content(path: Path) -> dict[str, Any]:
    """The manifest as it stands in the file."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    manifest: dict[str, Any] = json.loads(header["__metadata__"][FORMAT])
    return manifest


def edited(sound: Path, path: Path, manifest: Any) -> Path:
    """The checkpoint with another manifest, which is text or is made so."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    save_file(load_file(sound), path, metadata={FORMAT: text})
    return path


def with_args(sound: Path, path: Path, **args: Any) -> Path:
    manifest = content(sound)
    manifest["model"]["args"].update(args)
    return edited(sound, path, manifest)


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


# --- manifests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["hf-hub:some/model", "hf_hub:some/model", "local-dir:folder", "https://a.b/c", "../vit", "a/b", ""]
)
def test_a_name_in_a_manifest_is_that_of_an_architecture(
    canary: Path, sound: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = content(sound)
    manifest["model"]["name"] = name
    bad = edited(sound, canary.parent / "bad.safetensors", manifest)
    assert main(["info", f"checkpoint={bad}"]) == 2
    assert f"{name} is not the name of an architecture" in capsys.readouterr().err
    with pytest.raises(CorpError, match="not the name of an architecture"):
        load_pruned(bad)


def test_a_model_of_a_newer_timm(sound: Path, tmp_path: Path) -> None:
    manifest = content(sound)
    manifest["model"]["name"] = "vit_of_tomorrow"
    with pytest.raises(CorpError, match=r"vit_of_tomorrow is neither.*made with \(1\)"):
        load_pruned(edited(sound, tmp_path / "bad.safetensors", manifest))
    with pytest.raises(CorpError, match=r"model\.args\.of_tomorrow.*made with \(1\)"):
        load_pruned(with_args(sound, tmp_path / "bad.safetensors", of_tomorrow=1))


def deep(levels: int) -> str:
    return '{"model": ' * levels + "1" + "}" * levels


Edit = Callable[[dict[str, Any]], object]
BROKEN: list[tuple[Edit | str, str]] = [
    ("", "Expecting value"),
    ("[]", "it is not of type dict"),
    ("{", "cannot be read"),
    (deep(200_000), "nested too deeply"),
    ('{"format_version": 4, "blocks": 1e999}', "not a finite number"),
    ('{"format_version": 4, "blocks": NaN}', "NaN is not a finite number"),
    (lambda m: m.pop("blocks"), "it lacks blocks"),
    (lambda m: m.update(more=1), "it has the unknown key more"),
    (lambda m: m.update(format_version="4"), "it.format_version is not of type int"),
    (lambda m: m.update(dense_sha256=None), "dense_sha256 is not of type str"),
    (lambda m: m.update(recipe=[]), "recipe is not of type dict"),
    (lambda m: m["counts"]["dense"].update(macs=-1), "macs is negative"),
    (lambda m: m["model"]["data"].pop("input_size"), "no input_size"),
    (lambda m: m["model"]["data"].update(input_size=[3, 32]), "no input_size"),
    (lambda m: m["model"]["data"].update(input_size=[3, 10**5, 10**5]), "input_size is larger than"),
    (lambda m: m["model"]["data"].update(mean=["0"]), "mean is not of type float"),
    (lambda m: m["model"]["data"].update(tf_preprocessing=True), "unknown key tf_preprocessing"),
    (lambda m: m["model"]["args"].update(depth=2000), "depth is larger than"),
    (lambda m: m["model"].update(name="swin_tiny_patch4_window7_224", args={"depths": [400] * 4}), "depths is larger"),
    (lambda m: m["model"].update(name="cait_s24_224", args={"depth_token_only": 10**6}), "depth_token_only is larger"),
    (lambda m: m["model"]["args"].update(embed_dim=10**9), "embed_dim is larger than"),
    (lambda m: m["model"]["args"].update(img_size=[10**6, 10**6]), "img_size is larger than"),
    (lambda m: m["model"]["args"].update(num_classes=10**12), "num_classes is larger than"),
    (lambda m: m["blocks"].update({"blocks.0": 3}), "blocks.0 is not of type dict"),
    (lambda m: m["blocks"]["blocks.0"]["attn"].update(heads=True), "attn.heads is not of type int"),
    (lambda m: m["blocks"]["blocks.0"]["mlp"].pop("hidden"), "mlp lacks hidden"),
]


@pytest.mark.parametrize(("edit", "sentence"), BROKEN, ids=[sentence for _, sentence in BROKEN])
def test_broken_manifests_are_refused_in_a_sentence(
    sound: Path, tmp_path: Path, edit: Edit | str, sentence: str
) -> None:
    manifest: Any = edit
    if callable(edit):
        manifest = content(sound)
        edit(manifest)
    bad = edited(sound, tmp_path / "bad.safetensors", manifest)
    for read in (load_pruned, lambda path: info.run(InfoConfig(str(path)), Path())):
        with pytest.raises(CorpError, match=sentence) as caught:
            read(bad)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda m: m["blocks"]["blocks.0"]["mlp"].update(hidden=10**7), "cannot have 10000000 of 128 units of mlp"),
        (lambda m: m["blocks"]["blocks.0"]["attn"].update(heads=3), "cannot have 3 of 2 units of heads"),
        (lambda m: m["blocks"]["blocks.0"]["attn"].update(qk=0), "cannot have 0 of 16 units of qk"),
        (lambda m: m["blocks"].update({"blocks.7": m["blocks"]["blocks.0"]}), "has no block blocks.7"),
        (lambda m: m["blocks"]["blocks.0"]["mlp"].update(hidden=65), "do not match its manifest"),
        (lambda m: m["model"]["args"].update(depth=512), "do not match its manifest"),
        (lambda m: m["model"]["args"].update(num_classes=10**7), "do not match its manifest"),
        (lambda m: m["model"]["args"].update(depth="two"), "cannot be built"),
    ],
)
def test_sizes_are_compared_with_the_dense_model_and_the_tensors(
    sound: Path, tmp_path: Path, edit: Edit, sentence: str
) -> None:
    manifest = content(sound)
    edit(manifest)
    with pytest.raises(CorpError, match=sentence):
        load_pruned(edited(sound, tmp_path / "bad.safetensors", manifest))


def test_a_dense_model_that_no_file_was_pruned_from(tmp_path: Path) -> None:
    """Where buffers are computed, the dense model is made on the CPU: a small file must not ask for a large one."""
    dense, (name, args) = variants.build("dinov3"), variants.arguments("dinov3")
    pruned = prune_half(dense, variants.images("dinov3"), allowed("dinov3"))
    path = tmp_path / "pruned.safetensors"
    write_checkpoint(pruned, Manifest(ModelSpec(name, args, DATA), pruned_sizes(pruned, dense), {}, ""), path)
    manifest = content(path)
    manifest["model"]["args"]["mlp_ratio"] = 10**7
    with pytest.raises(CorpError, match="do not match its manifest"):
        load_pruned(edited(path, tmp_path / "bad.safetensors", manifest))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a JSON value."""
    if path:
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(item, (*path, key))


@pytest.mark.parametrize("format_version", [3, 4])
def test_any_value_of_a_manifest_may_be_anything(
    sound: Path, tmp_path: Path, format_version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {**content(sound), "format_version": format_version}
    if format_version == 3:
        del whole["counts"]  # so that corp info has to build the model
    junk = cycle([None, True, -1, 0, 2**70, 0.5, "x\x1b[31m", [], {}, [[1]], {"a": 1}])
    refused = 0
    for path in leaves(whole):
        for _ in range(3):
            manifest = copy.deepcopy(whole)
            parent: Any = manifest
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = next(junk)
            bad = edited(sound, tmp_path / "bad.safetensors", manifest)
            for read in (load_pruned, lambda path: info.run(InfoConfig(str(path)), Path())):
                try:
                    read(bad)
                except CorpError:
                    refused += 1
    assert refused > 100
    assert "\x1b[31m" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (struct.pack("<Q", 2**63) + b"{}", "header is cut short"),
        (struct.pack("<Q", 2) + b"[]", "not a whole safetensors"),
        (struct.pack("<Q", 2) + b"\xff{", "not a whole safetensors"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "not a whole safetensors"),
        (struct.pack("<Q", 20) + b'{"__metadata__": []}', "not written by corp prune"),
        (struct.pack("<Q", 37) + b'{"__metadata__": {"corp-pruned": {}}}', "cannot be read"),
        (b"{}", "not a whole safetensors"),
    ],
)
def test_broken_heads_are_refused_in_a_sentence(tmp_path: Path, header: bytes, sentence: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(header)
    for read in (load_pruned, lambda path: info.run(InfoConfig(str(path)), Path())):
        with pytest.raises(CorpError, match=sentence):
            read(path)


def test_a_zip_is_no_pruned_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CorpError, match="not a whole safetensors"):
        load_pruned(path)
