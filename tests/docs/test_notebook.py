"""docs/first-steps.ipynb: a valid notebook without outputs, whose cells run in order."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from corp_cli.cli import main as cli
from tests.support.documents import ROOT, read

NOTEBOOK: dict[str, Any] = json.loads(read("docs/first-steps.ipynb"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
TEXT = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown"]


def test_it_is_a_valid_notebook() -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install -e '.[dev]'")
    nbformat.validate(NOTEBOOK)


def test_it_holds_no_outputs() -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.usefixtures("tiny_digits", "empty_folder")
def test_its_cells_run_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one namespace, as a kernel does; a cell that begins with ! is a command line.

    Without matplotlib the cell that draws, done once more, prints a table.
    """
    monkeypatch.setenv("MPLBACKEND", "agg")
    plotting = find_spec("matplotlib") is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    for source in CODE:
        if source.startswith("!"):
            program, *argv = shlex.split(source.removeprefix("!"))
            assert program == "corp"
            assert cli.main(argv) == 0, capsys.readouterr().err
        else:
            exec(compile(source, "cell", "exec"), names)
    out = capsys.readouterr().out
    assert re.search(r"pruned +top-1 \d+\.\d%, agreement \d+\.\d%", out)
    assert ("kept in %" in out) is not plotting
    assert ("axes" in names) is plotting
    assert "tensor([[" in out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (drawing,) = (source for source in CODE if "matplotlib" in source)
    exec(compile(drawing, "cell", "exec"), names)
    assert "kept in %" in capsys.readouterr().out
    written = {path.name for path in Path("first-notebook").iterdir()}
    assert {"pruned.safetensors", "report.json", "bench", "model.pt2"} <= written


def test_its_links_lead_somewhere() -> None:
    links = [link for text in TEXT for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert links
    assert all((ROOT / "docs" / link).is_file() for link in links)
