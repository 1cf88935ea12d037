"""What a model says of itself to timm."""

from __future__ import annotations

from typing import Any

import timm

from corp_cli.models.preprocess import put_own_cfg


def test_timm_answers_with_the_models_own_preprocessing_for_tests_too() -> None:
    model: Any = timm.create_model("deit_tiny_patch16_224", num_classes=3)
    of_weights = {
        "test_input_size": (3, 288, 288),
        "test_crop_pct": 0.5,
        "license": "mit",
        "label_names": ["a", "b", "c"],
    }
    model.pretrained_cfg = {**model.pretrained_cfg, **of_weights}
    data = {"input_size": [3, 32, 32], "mean": [0.1, 0.2, 0.3], "std": [1.0, 1.0, 1.0]}
    data |= {"interpolation": "bilinear", "crop_pct": 0.9, "crop_mode": "squash"}
    put_own_cfg(model, data)
    assert timm.data.resolve_model_data_config(model) == data
    assert timm.data.resolve_model_data_config(model, use_test_size=True) == data
    assert (model.default_cfg["num_classes"], model.default_cfg["label_names"]) == (3, ["a", "b", "c"])
    assert "license" not in model.default_cfg
