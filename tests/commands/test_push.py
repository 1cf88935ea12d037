"""`corp push`: what goes to the hub, what the card says, and what is refused. A stand-in takes the hub's place."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file

import corp_cli
from corp_cli.cli.main import main
from corp_cli.commands.push import SHARDS
from corp_cli.files.checkpoint import load_pruned
from corp_cli.models.bundled import BUNDLED
from corp_cli.runtime import hub
from tests.support.tiny import write_tiny

pytestmark = pytest.mark.usefixtures("empty_folder")

ALL = ["README.md", "config.json", "model.safetensors", "report.json"]
DRY = ["folder=card", "--dry-run"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What corp prune leaves: a checkpoint and its report."""
    folder, patch = tmp_path_factory.mktemp("run") / "here", pytest.MonkeyPatch()
    with patch.context() as held:
        held.setitem(BUNDLED, "vit_digits", write_tiny(folder.parent / "tiny.safetensors"))
        quick = ["calibration.num_images=64", "calibration.num_workers=0", "evaluation.num_workers=0"]
        quick += ["sparsity.joint=0.5", "compensation=mean", "evaluation.throughput_batches=0", "device=cpu"]
        assert main(["prune", *quick, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def checkpoint(run_folder: Path, empty_folder: None) -> Path:
    """A copy of it in here/, for a test to change."""
    shutil.copytree(run_folder, "here")
    return Path("here/pruned.safetensors")


@dataclass
class Uploads:
    """What the stand-in of the hub was asked for, and the error that it answers with."""

    made: list[tuple[str, Any]] = field(default_factory=list)
    sent: dict[str, bytes] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    fails: Exception | None = None


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """A hub that answers and keeps what it is sent."""
    found = Uploads()

    def create_repo(api: HfApi, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        if found.fails:
            raise found.fails
        assert exist_ok
        found.made.append((repo_id, private))
        return f"https://hub.example/{repo_id}"

    def upload_folder(api: HfApi, *, folder_path: Path, **told: Any) -> None:
        found.told = told
        found.sent = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}

    monkeypatch.setattr(hub, "unreachable", lambda url: None)
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return found


def push(*args: str) -> int:
    """`corp push me/small ...`."""
    return main(["push", "me/small", "checkpoint=here/pruned.safetensors", *args])


def test_a_dry_run_writes_a_folder_that_both_loaders_read(
    checkpoint: Path, uploads: Uploads, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(*DRY) == 0
    said = capsys.readouterr()
    assert said.out == f"Wrote {', '.join(ALL)} to card; nothing was uploaded.\n"
    assert said.err == ""
    assert sorted(path.name for path in Path("card").iterdir()) == ALL
    assert sorted(path.name for path in Path().iterdir()) == ["card", "here"]
    assert not uploads.made
    assert Path("card/report.json").read_bytes() == checkpoint.with_name("report.json").read_bytes()
    x, expected = torch.rand(4, 1, 8, 8), load_pruned(checkpoint)
    corp_cli.register()
    by_timm = timm.create_model("local-dir:card", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(load_pruned("card/model.safetensors")(x), expected(x))
        torch.testing.assert_close(by_timm(x), expected(x))
    assert timm.data.resolve_model_data_config(by_timm)["mean"] == [0.5]


def test_the_card_holds_the_figures_of_the_report(checkpoint: Path) -> None:
    assert push(*DRY) == 0
    report = json.loads(checkpoint.with_name("report.json").read_text())
    text = Path("card/README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    cells = {name.strip("| "): values for name, *values in rows}
    for label, key in (("top-1", "top1"), ("top-5", "top5")):
        found = [report["evaluation"][model][key] for model in ("dense", "uncompensated", "pruned")]
        assert [float(cell.strip("%| ")) for cell in cells[label]] == pytest.approx(found, abs=0.005)
    for label, key in (("same class as the dense model", "agreement"), ("KL from the dense model, nats", "kl")):
        found = [report["evaluation"][model][key] for model in ("uncompensated", "pruned")]
        assert [float(cell.strip("%| ")) for cell in cells[label][1:]] == pytest.approx(found, rel=0.005, abs=0.005)
    for label, key in (("parameters", "parameters"), ("MACs of one image", "macs")):
        found = [report["size"][model][key] for model in ("dense", "pruned")]
        assert [int(cell.replace(",", "")) for cell in cells[label][:2]] == found
        assert float(cells[label][2].strip("%| ")) == pytest.approx(report["size"]["removed_percent"][key], abs=0.05)
    sizes = [(block["dense"], block["pruned"]) for block in report["blocks"]]
    dense, pruned = sizes[0]
    assert sizes == [(dense, pruned)] * 2  # alike, so that one row holds both
    kept = [
        f"{pruned[g]} of {dense[g]}" if pruned[g] != dense[g] else f"{dense[g]}" for g in ("mlp", "qk", "vo", "heads")
    ]
    assert [cell.strip("| ") for cell in cells["blocks.0 to blocks.1"]] == kept
    seen, calibrated = report["evaluation"], report["calibration"]
    assert f"On {seen['images']} images of `{seen['source']}`, none of which was calibrated on; " in text
    assert f"{seen['labelled_images']} have labels." in text
    assert f"Calibrated on {calibrated['images']} unlabelled images of `{calibrated['source']}`." in text
    assert report["model"]["dense_sha256"] in text


def test_the_card_is_one_that_the_hub_understands(checkpoint: Path) -> None:
    assert push(*DRY, "base_model=timm/vit_tiny", "license=cc-by-4.0") == 0
    card = ModelCard.load("card/README.md")
    report = json.loads(checkpoint.with_name("report.json").read_text())
    assert card.data.license == "cc-by-4.0"
    assert card.data.base_model == "timm/vit_tiny"
    assert card.data.library_name == "timm"
    assert {"corp", "timm"} <= set(card.data.tags or [])
    assert card.data.pipeline_tag == "image-classification"
    values = [found.metric_value for found in card.data.eval_results or []]
    assert values == [report["evaluation"]["pruned"][key] for key in ("top1", "top5")]
    for said in ("`cc-by-4.0`", "huggingface.co/timm/vit_tiny", "Zhang, Boxiang and Yang, Baijian"):
        assert said in card.text
    for line in ('load_pruned("hf-hub:me/small")', 'timm.create_model("hf-hub:me/small", pretrained=True)'):
        assert line in card.text


def test_no_path_of_this_machine_goes_out(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint.with_name("report.json")
    report = json.loads(path.read_text())
    report["evaluation"]["source"] = "/home/me/secret/val"  # as no report of corp's says
    report["calibration"]["source"] = "C:\\Users\\me\\secret\\photos"
    path.write_text(json.dumps(report))
    assert push(*DRY) == 0
    text = Path("card/README.md").read_text()
    assert "images of `val`" in text
    assert "images of `photos`" in text
    assert "secret" not in text
    assert str(tmp_path) not in text


def test_uploaded_in_one_commit_private_unless_asked(
    checkpoint: Path, uploads: Uploads, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push() == 0
    assert capsys.readouterr().out == f"Uploaded {', '.join(ALL)} to https://hub.example/me/small.\n"
    assert uploads.made == [("me/small", True)]
    assert sorted(uploads.sent) == ALL
    assert uploads.sent["model.safetensors"] == checkpoint.read_bytes()
    assert uploads.told["repo_id"] == "me/small"
    assert {*ALL, *SHARDS} == {*uploads.told["allow_patterns"]}
    assert {"model.safetensors", *SHARDS} < {*uploads.told["delete_patterns"]}  # of whichever kind was pushed before
    assert [path.name for path in Path().iterdir()] == ["here"]
    assert push("private=false", "folder=kept") == 0
    assert uploads.made[1] == ("me/small", False)
    assert sorted(path.name for path in Path("kept").iterdir()) == ALL


def test_the_repository_may_be_given_by_its_key(checkpoint: Path, uploads: Uploads) -> None:
    assert main(["push", f"checkpoint={checkpoint}", "repo=me/other"]) == 0
    assert uploads.made == [("me/other", True)]


def test_a_folder_is_written_again_and_that_of_others_is_not(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(*DRY) == 0
    checkpoint.with_name("report.json").unlink()
    assert push(*DRY) == 0  # and the report of before is gone
    assert sorted(path.name for path in Path("card").iterdir()) == [name for name in ALL if name != "report.json"]
    Path("card/notes.txt").write_text("mine")
    Path("project").mkdir()
    Path("project/README.md").write_text("mine")
    Path("file").write_text("mine")
    capsys.readouterr()
    for folder, held in (("card", "holds notes.txt"), ("project", "holds README.md"), ("file", "is not a folder")):
        assert push(f"folder={folder}", "--dry-run") == 2
        assert held in capsys.readouterr().err
    assert Path("project/README.md").read_text() == "mine"
    assert Path("card/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["pruned.safetensors", "tuned.safetensors"])
def test_without_a_report_of_it_the_card_has_no_figures(
    name: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "pruned.safetensors":
        checkpoint.with_name("report.json").unlink()
    checkpoint.rename(checkpoint.with_name(name))  # trained since, perhaps: the report is not of it
    assert main(["push", "me/small", f"checkpoint=here/{name}", *DRY]) == 0
    said = capsys.readouterr().err
    assert f"there is no report.json of here/{name}" in said
    assert "the licence of the dense weights is not known" in said
    card = ModelCard.load("card/README.md")
    assert card.data.license == "unknown"
    assert not card.data.eval_results
    assert "Not measured here" in card.text
    assert "Unknown. Pruned weights keep the licence" in card.text
    assert not Path("card/report.json").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"dense_sha256": "0" * 64}}, "is the report of another checkpoint"),
        ({"size": {"pruned": {"macs": 1}}}, "is the report of another checkpoint"),
        ({"evaluation": {"pruned": {"top1": "much"}}}, "which is not a number"),
        ({"schema_version": 9}, "has schema_version 9"),
        ({"model": {"timm_name": None}}, "is not a report"),
    ],
)
def test_a_report_that_is_not_of_the_checkpoint_is_refused(
    change: dict[str, Any], sentence: str, checkpoint: Path, uploads: Uploads, capsys: pytest.CaptureFixture[str]
) -> None:
    def merge(content: dict[str, Any], changes: dict[str, Any]) -> None:
        for key, value in changes.items():
            if isinstance(value, dict):
                merge(content[key], value)
            else:
                content[key] = value

    path = checkpoint.with_name("report.json")
    report = json.loads(path.read_text())
    merge(report, change)
    path.write_text(json.dumps(report))
    assert push() == 2
    assert sentence in capsys.readouterr().err
    assert not uploads.made


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "Say what to push and where to: corp push owner/name checkpoint="),
        (["me/small"], "Say what to push and where to"),
        (["small", "checkpoint=x"], "repo=small is no repository of the hub; write owner/name"),
        (["me/small/x", "checkpoint=x"], "repo=me/small/x is no repository"),
        (["me/..small", "checkpoint=x"], "is no repository"),
        ([f"me/{'a' * 99}", "checkpoint=x"], "is no repository"),
        (["me/small", "checkpoint=x", "base_model=tiny"], "base_model=tiny is no repository"),
        (["me/small", "x"], "is x meant as checkpoint=x?"),
        (["me/small", "checkpoint=x", "--dry-run"], "say where to write the files instead: folder=FOLDER"),
        (["me/small", "checkpoint=x", *DRY], "The checkpoint x does not exist."),
        (["me/small", "checkpoint=x", "token=y"], "corp push has no key token"),
        (["me/small", "checkpoint=x", "-m"], "one thing at a time"),
    ],
)
def test_mistakes(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", *argv]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(Path().iterdir())


def test_dense_weights_are_not_pushed(uploads: Uploads, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "me/small", f"checkpoint={BUNDLED['vit_digits'].weights}"]) == 2
    assert "was not written by corp prune" in capsys.readouterr().err
    assert not uploads.made


@pytest.mark.usefixtures("checkpoint")
def test_a_hub_out_of_reach_is_said_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert push("folder=card") == 2
    said = capsys.readouterr().err
    assert "me/small cannot be uploaded (" in said
    assert "is out of reach: no test asks it); --dry-run folder=FOLDER writes it to a folder instead." in said
    assert [path.name for path in Path().iterdir()] == ["here"]


class RefusedError(Exception):
    """As the hub's client says that it may not."""

    def __init__(self, status: int) -> None:
        super().__init__(f"Client error '{status}' for url\nmore")
        self.response = type("Response", (), {"status_code": status})()


@pytest.mark.usefixtures("checkpoint")
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RefusedError(401), "the hub does not let you write there: log in with `hf auth login` as me"),
        (RefusedError(403), "the hub does not let you write there"),
        (RefusedError(500), "RefusedError: Client error '500' for url); then run the same command again."),
    ],
)
def test_what_the_hub_refuses_is_said_and_leaves_nothing(
    error: Exception, sentence: str, uploads: Uploads, capsys: pytest.CaptureFixture[str]
) -> None:
    uploads.fails = error
    assert push("folder=card") == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["here"]


def test_the_weights_are_those_of_the_run(checkpoint: Path) -> None:
    assert push(*DRY) == 0
    ours, theirs = load_file(checkpoint), load_file("card/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
