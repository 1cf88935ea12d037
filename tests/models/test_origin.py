"""Whose dense weights a run took, and their licence: said where timm, the hub or corp knows, and not guessed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm

from corp_cli.models.origin import Origin, origin_of
from corp_cli.runtime import hub


def test_what_timm_knows() -> None:
    about = timm.get_pretrained_cfg("deit_tiny_patch16_224")
    assert origin_of("deit_tiny_patch16_224", own_weights=False) == Origin(about.hf_hub_id, about.license, "timm")
    tagged = origin_of("vit_base_patch16_224.dino", own_weights=False)
    assert tagged.base_model == "timm/vit_base_patch16_224.dino"


@pytest.mark.parametrize(
    "name", ["deit_tiny_patch16_224.nope", "no_such_model", "local-dir:folder", "transformers:folder"]
)
def test_what_nobody_knows_is_not_guessed(name: str) -> None:
    assert origin_of(name, own_weights=False) == Origin()


def test_of_own_weights_nothing_is_known() -> None:
    assert origin_of("deit_tiny_patch16_224", own_weights=True) == Origin()
    assert origin_of("vit_digits", own_weights=True) == Origin()
    assert origin_of("vit_digits", own_weights=False).license == "apache-2.0"


@pytest.mark.parametrize("prefix", ["hf-hub:", "transformers:"])
def test_the_hub_is_asked_for_the_licence_of_what_it_holds(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def model_info(repository: str) -> SimpleNamespace:
        asked.append(repository)
        return SimpleNamespace(card_data={"license": "mit"} if repository == "me/vit" else None)

    monkeypatch.setattr("huggingface_hub.model_info", model_info)
    assert origin_of(f"{prefix}me/vit", own_weights=False) == Origin("me/vit", None, "the hub")
    assert asked == []  # out of reach
    monkeypatch.setattr(hub, "_answers", {})
    monkeypatch.setattr(hub, "unreachable", lambda url: None)
    assert origin_of(f"{prefix}me/vit@v1", own_weights=False) == Origin("me/vit", "mit", "the hub")
    assert origin_of(f"{prefix}me/bare", own_weights=False) == Origin("me/bare", None, "the hub")
    assert asked == ["me/vit", "me/bare"]
