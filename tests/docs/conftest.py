"""The pages run as typed, and so on all images of the bundled model: here it has fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from corp_cli.models.bundled import BUNDLED, BundledModel


@pytest.fixture
def tiny_digits(
    tiny_model: BundledModel, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of two narrow blocks stands for the bundled one, with an eighth of its images to calibrate on."""
    path = tmp_path_factory.mktemp("few") / "digits_train.safetensors"
    save_file({name: tensor[:128] for name, tensor in load_file(tiny_model.calibration).items()}, path)
    monkeypatch.setitem(BUNDLED, "vit_digits", replace(tiny_model, calibration=path))
