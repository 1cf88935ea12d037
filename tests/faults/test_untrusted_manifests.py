"""Manifests from strangers: a checkpoint that somebody edited is refused in a sentence."""

from __future__ import annotations

import copy
import struct
import zipfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from corp_cli.cli.main import main
from corp_cli.commands import info
from corp_cli.config.checkpoints import InfoConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import load_pruned, write_checkpoint
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from tests.faults.untrusted import DATA, content, edited, with_args
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants


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
