"""Choices of configs/recipe as dataclasses, for tests that do not go through Hydra."""

from __future__ import annotations

from typing import Any

from corp_cli.config.prune import CompensationConfig, RankerConfig

PAPER_COMPENSATION = CompensationConfig("affine", "sylvester", "affine", ridge_lambda=1e-3, propagate="none")
PAPER: dict[str, Any] = {
    "ranker": RankerConfig(mlp="activation"),
    "compensation": PAPER_COMPENSATION,
    "recipe": "paper",
}
OPTIN: dict[str, Any] = {
    "ranker": RankerConfig(mlp="optin", heads="optin", optin_images=4),
    "compensation": CompensationConfig("none", "none", "none", ridge_lambda=1e-3, propagate="none"),
    "recipe": "optin",
}
