"""The pages of docs/: every command is understood, first-steps runs as typed, and every problem says what it shows."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from corp_cli import load_config
from corp_cli.cli import main as cli
from corp_cli.config.prune import PruneConfig
from corp_cli.models.bundled import BUNDLED
from tests.support.documents import (
    PAGES,
    check_understood,
    code_blocks,
    commands,
    commands_of,
    is_plain,
    read,
    write_yaml,
)

GUIDES = [page.removeprefix("docs/").removesuffix(".md") for page in PAGES if page.startswith("docs/")]
DIGITS = BUNDLED["vit_digits"]


def pairs(text: str) -> list[tuple[list[str], str]]:
    """(arguments, message) wherever what corp says stands right below its command."""
    found = re.findall(r"^```bash\n([^`]*?)^```\n\n```text\n(corp: [^`]*?)^```$", text, re.MULTILINE)
    return [(commands(bash)[0], " ".join(message.split())) for bash, message in found]


PROBLEMS = pairs(read("docs/problems.md"))
SHOWN = {guide: commands_of(read(f"docs/{guide}.md")) for guide in GUIDES}
COMMANDS = {" ".join(argv): (guide, argv) for guide in GUIDES for argv in SHOWN[guide]}  # each once


pytestmark = pytest.mark.usefixtures("empty_folder")


def test_there_is_something_to_test() -> None:
    guides = ("first-steps", "your-model", "your-data", "export", "ci", "problems")
    assert all(len(SHOWN[guide]) >= 5 for guide in guides)
    assert len(SHOWN["usage"]) > 30
    assert sum(is_plain(argv) for argv in SHOWN["usage"]) > 15
    assert len(PROBLEMS) == len(re.findall(r"^## \d", read("docs/problems.md"), re.MULTILINE)) == 10


@pytest.mark.parametrize(("guide", "argv"), COMMANDS.values(), ids=COMMANDS)
def test_command_is_understood(
    guide: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_yaml(read(f"docs/{guide}.md"), tmp_path)
    if not is_plain(argv) or any(word.startswith("hydra.") for word in argv):
        check_understood(argv, monkeypatch, capsys)
    if is_plain(argv):  # once: composing a config is most of what a command takes here
        assert isinstance(load_config(*(o for o in argv[1:] if not o.startswith("hydra."))), PruneConfig)


@pytest.mark.usefixtures("tiny_digits")
def test_first_steps_work_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All in order, in one folder, but for the sweep."""
    for argv in SHOWN["first-steps"]:
        if "-m" not in argv:
            assert cli.main(argv) == 0, capsys.readouterr().err
    assert "warning" not in capsys.readouterr().err
    assert {"first", "quarter", "budget", "edited"} <= {path.name for path in tmp_path.iterdir()}
    assert {"evaluation.json", "per_class.csv"} <= {path.name for path in Path("first/evaluation").iterdir()}
    plans = [Path(run, "plan.yaml").read_text().partition("blocks:")[2] for run in ("budget", "edited")]
    assert plans[0] == plans[1]
    (python,) = [block.body for block in code_blocks(read("docs/first-steps.md")) if block.marked]
    Path("use.py").write_text(python)
    runpy.run_path("use.py")
    assert "tensor([" in capsys.readouterr().out


# --- problems -------------------------------------------------------------------------------------------------


def gray(folder: str, count: int, bad: int = 0) -> None:
    """Images that the bundled model can take, the first `bad` of them cut off."""
    Path(folder).mkdir()
    for i in range(count):
        path = Path(folder, f"{i:03}.png")
        Image.new("L", (8, 8), 5 * i).save(path)
        if i < bad:
            path.write_bytes(path.read_bytes()[:40])


def other_classes() -> None:
    """DeiT-Tiny for 37 classes, with random weights."""
    gray("photos", 4)
    save_file(timm.create_model("deit_tiny_patch16_224", num_classes=37).state_dict(), "weights.safetensors")


class Model:
    """A model saved whole, as code."""


def whole_model() -> None:
    """A pickle."""
    gray("photos", 4)
    torch.save(Model(), "model.pth")


def shifted_labels() -> None:
    """Digits in folders of the next digit."""
    digits = load_file(DIGITS.evaluation)
    for i, (image, label) in enumerate(zip(digits["images"][:40], digits["labels"], strict=False)):
        folder = Path("val", str((int(label) + 1) % 10))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze().numpy()).save(folder / f"{i}.png")


# what each of the ten commands finds in its folder, in order
PREPARE: list[Callable[[], None]] = [
    lambda: None,
    lambda: Path("photos").mkdir(),
    lambda: gray("photos", 40, bad=3),
    other_classes,
    whole_model,
    lambda: gray("photos", 4),
    lambda: gray("photos", 4),
    lambda: None,
    shifted_labels,
    lambda: gray("few", 4),
]


@pytest.mark.parametrize("number", range(1, 11))
def test_problem_says_what_the_page_shows(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv, message = PROBLEMS[number - 1]
    PREPARE[number - 1]()
    code = cli.main(argv)
    said = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    assert [line for line in said if re.fullmatch(pattern, line)], said
    assert code == (0 if message.startswith("corp: warning: ") else 2)
