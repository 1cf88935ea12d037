"""File names of any bytes: what people have on their disks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from corp_cli.cli.main import main
from tests.support.bad_input_files import QUICK

pytestmark = pytest.mark.usefixtures("tiny_digits")


def test_names_that_are_not_utf8_work_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (b"photos/\xff", b"photos/\xfe"):
        os.makedirs(folder)
        for i in range(20):
            name = folder + b"/\xff%d.png" % i
            with open(name, "wb") as file:
                Image.new("L", (8, 8), i * 9).save(file, "PNG")
    Path(os.fsdecode(b"photos/\xff/\xfe.png")).write_text("no image")
    Path(os.fsdecode(b"photos/\xff/\xfe.\xff")).write_text("another type")
    bad = ["calibration.max_bad=0.2", "evaluation.max_bad=0.2", "calibration.path=photos", "hydra.run.dir=out"]
    assert main(["prune", *QUICK, *bad]) == 0, capsys.readouterr().err
    report = json.loads(Path("out/report.json").read_text("utf-8"))
    named = report["calibration"]["bad"]["first"] + report["evaluation"]["bad"]["first"]
    assert any("\\udcff/\\udcfe.png" in sentence for sentence in named)
    assert any("other types" in warning for warning in report["warnings"])
    json.dumps(report, ensure_ascii=False).encode("utf-8")  # no half of a character anywhere
