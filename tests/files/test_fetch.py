"""A pruned checkpoint on the hub is loaded as a file is, by every command that takes one; what is not one is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants

from corp_cli import load_pruned, register
from corp_cli.cli.main import main
from corp_cli.commands import bench
from corp_cli.config.checkpoints import BenchConfig
from corp_cli.errors import CorpError
from corp_cli.files.checkpoint import pruned_model, write_checkpoint
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.resize import pruned_sizes
from corp_cli.models.spec import Manifest, ModelSpec
from corp_cli.runtime import hub
from tests.models.test_adapter import allowed, prune_half
from tests.support import variants
from tests.support.hub import StandIn, serving, take_for_hub
from tests.support.variants import logits

DATA = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
DATA |= {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
FILE = "model.safetensors"


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    """A checkpoint with random weights and half of every group gone."""
    dense = variants.build("vit")
    small = prune_half(variants.build("vit"), variants.images("vit"), allowed("vit")).eval()
    spec, path = ModelSpec(*variants.arguments("vit"), DATA), tmp_path / "pruned.safetensors"
    write_checkpoint(small, Manifest(spec, pruned_sizes(small, dense), {}, ""), path)
    return path


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruned: Path) -> Iterator[StandIn]:
    """A hub with that checkpoint, with one of the same weights as version v1, and with dense weights."""
    with serving() as found:
        take_for_hub(found.endpoint, tmp_path / "cache", monkeypatch)
        found.files = {f"me/pruned/{revision}/{FILE}": pruned.read_bytes() for revision in ("main", "v1")}
        found.files[f"me/dense/main/{FILE}"] = BUNDLED["vit_digits"].weights.read_bytes()
        found.files["me/pickle/main/pytorch_model.bin"] = b"\x80\x04"
        yield found


@pytest.mark.parametrize("at", ["", "@v1"])
def test_loaded_from_the_hub_it_is_the_same_model(stand_in: StandIn, pruned: Path, at: str) -> None:
    x = variants.images("vit")
    assert torch.equal(logits(load_pruned(f"hf-hub:me/pruned{at}"), x), logits(load_pruned(pruned), x))
    revision = at[1:] or "main"
    assert stand_in.asked == ["HEAD /", *(f"{m} /me/pruned/resolve/{revision}/{FILE}" for m in ("HEAD", "GET"))]


def test_it_is_fetched_once_and_then_found_without_the_hub(
    stand_in: StandIn, pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = pruned_model("hf-hub:me/pruned")
    assert loaded.source == "hf-hub:me/pruned"
    load_pruned("hf-hub:me/pruned")
    assert [one.partition(" ")[0] for one in stand_in.asked] == ["HEAD", "HEAD", "GET", "HEAD"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again, x = load_pruned("hf-hub:me/pruned"), variants.images("vit")
    assert torch.equal(logits(again, x), logits(load_pruned(pruned), x))
    with pytest.raises(CorpError, match=r"hf-hub:me/other cannot be fetched \(HF_HUB_OFFLINE is set, and it is not in"):
        load_pruned("hf-hub:me/other")


@pytest.mark.usefixtures("stand_in", "empty_folder")
def test_commands_take_it(pruned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for checkpoint in ("hf-hub:me/pruned@v1", str(pruned)):
        assert main(["info", f"checkpoint={checkpoint}"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    args = ["checkpoint=hf-hub:me/pruned", "evaluation.num_workers=0"]
    assert main(["export", *args, "format=timm", "hydra.run.dir=export"]) == 0
    assert Path("export/timm", FILE).is_file()
    assert bench.load(BenchConfig(checkpoint="hf-hub:me/pruned"))["pruned"].source == "hf-hub:me/pruned"
    images = variants.images("vit")
    torch.save(((images - images.min()) / (images.max() - images.min()) * 255).byte(), "images.pt")
    reference = [f"model.name={variants.arguments('vit')[0]}", "model.pretrained=false"]
    reference += [f"+model.args.{key}={value}" for key, value in variants.arguments("vit")[1].items()]
    evaluation = ["evaluation.path=images.pt", "device=cpu", "hydra.run.dir=evaluation"]
    assert main(["evaluate", *args, *evaluation, *reference]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("stand_in")
def test_timm_takes_it_by_the_same_door(pruned: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architecture": "corp_pruned", "num_classes": 5, "pretrained_cfg": {}}')
    monkeypatch.setattr("timm.models._hub.download_from_hf", lambda *_, **__: config)
    register()
    model, x = timm.create_model("hf-hub:me/pruned@v1", pretrained=True).eval(), variants.images("vit")
    torch.testing.assert_close(logits(model, x), logits(load_pruned(pruned), x))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "me/dense",
            r"hf-hub:me/dense holds no pruned checkpoint .*; give a repository that corp push made, or model\.",
        ),
        ("me/pickle", r"hf-hub:me/pickle cannot be fetched \(the repository has no such file\); check the name\.$"),
        ("me/nothing", r"cannot be fetched \(the hub has no such repository, or it is private: .*hf auth login"),
        ("me/pruned@v2", r"hf-hub:me/pruned@v2 cannot be fetched \(the repository has no such revision"),
        ("me/pruned/more", r"HFValidationError: Repo id must"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(
    name: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CorpError, match=sentence):
        load_pruned(f"hf-hub:{name}")
    assert main(["info", f"checkpoint=hf-hub:{name}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_gated_repository_says_what_to_do(stand_in: StandIn) -> None:
    stand_in.refuses["me/pruned"] = (403, "GatedRepo")
    with pytest.raises(CorpError, match=r"it is gated: accept its terms .* log in with `hf auth login`"):
        load_pruned("hf-hub:me/pruned")


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "unreachable", lambda url: "no route to host")
    said = r"out of reach: no route to host, and it is not in the cache\); download it elsewhere and give checkpoint=F"
    with pytest.raises(CorpError, match=said):
        load_pruned("hf-hub:corp-no/such-model")


def test_no_error_is_the_cause_of_its_own_cause() -> None:
    """Of the one file and of the index of shards, both are missing; who goes down to the first cause must arrive."""
    with pytest.raises(CorpError) as raised:
        load_pruned("hf-hub:corp-no/such-model")
    seen: list[BaseException] = []
    error: BaseException | None = raised.value
    while error is not None:
        assert error not in seen
        seen.append(error)
        error = error.__cause__ or error.__context__
