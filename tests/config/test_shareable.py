"""What leaves the machine names no folder of it and holds no environment variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from corp_cli.cli.compose import load_config
from corp_cli.config.images import DataConfig
from corp_cli.config.shareable import FromEnvironment, from_environment, shareable


def test_paths_are_cut_to_their_last_part_wherever_they_stand() -> None:
    cfg = {"path": "/data/of anna/photos", "name": "local-dir:/models/mine", "relative": "photos/cats", "top": "/top"}
    found = shareable([cfg, "of /data/of anna/photos/1.png", f"in {Path.cwd()}/run", "mnt/data/of anna/x"], cfg)
    assert found == [
        {"path": "photos", "name": "local-dir:mine", "relative": "photos/cats", "top": "/top"},
        "of photos/1.png",
        "in run",
        "mnt/data/of anna/x",
    ]


def test_variables_are_named_and_not_told() -> None:
    cfg = {"secret": from_environment("s3cr3t", "${oc.env:TOKEN}"), "short": from_environment("a", "${oc.env:A}")}
    assert shareable({**cfg, "text": "a key s3cr3t."}, cfg) == {
        "secret": "${oc.env:TOKEN}",
        "short": "${oc.env:A}",
        "text": "a key ${oc.env:TOKEN}.",
    }


def test_dataclasses_keep_their_kind_and_numbers() -> None:
    assert shareable(DataConfig(crop_pct=0.5, mean=[0.1]), {}) == DataConfig(crop_pct=0.5, mean=[0.1])


def test_what_a_config_takes_from_the_environment_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/secret/place")
    cfg = load_config(
        "calibration.path=${oc.env:PLACE}/a", "evaluation.path=${calibration.path}", "+model.args.x=[${oc.env:PLACE}]"
    )
    values = cfg.calibration.path, cfg.evaluation.path, cfg.model.args["x"][0]
    assert values == ("/secret/place/a", "/secret/place/a", "/secret/place")
    assert all(isinstance(value, FromEnvironment) for value in values)
    assert not isinstance(cfg.model.name, FromEnvironment)
    assert "secret" not in str(shareable(cfg, cfg))
