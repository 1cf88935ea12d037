"""A hub that is out of reach is found out in seconds; what is in its cache is used; a slow one is waited for."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
from huggingface_hub import constants, hf_hub_download, snapshot_download

from corp_cli.config.prune import ModelConfig
from corp_cli.errors import CorpError
from corp_cli.models.loading import load_dense
from corp_cli.runtime import hub
from tests.support.hub import COMMIT, StandIn, close_sessions, hole, serving, take_for_hub

HELD = "me/held/main/config.json"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with serving() as found:
        take_for_hub(found.endpoint, tmp_path / "cache", monkeypatch)
        yield found


def put_in_cache(name: str, file: str, content: str) -> Path:
    """A file as the hub's client would have kept it."""
    place = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    path = place / "snapshots" / COMMIT / file
    for one, text in ((path, content), (place / "refs" / "main", COMMIT)):
        one.parent.mkdir(parents=True)
        one.write_text(text)
    return path


def test_a_hub_that_says_nothing_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.4)
    with hole() as endpoint:
        take_for_hub(endpoint, tmp_path, monkeypatch)
        for name in ("deit_tiny_patch16_224", "hf-hub:me/model", "transformers:me/model"):
            began = time.monotonic()
            with pytest.raises(CorpError, match=rf"cannot be fetched \({endpoint} is out of reach: .*; without a net"):
                load_dense(ModelConfig(name, args={"depth": 1} if name.startswith("deit") else {}))
            assert time.monotonic() - began < 2
    assert capsys.readouterr() == ("", "")


def test_a_connection_that_is_refused_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hole() as endpoint:
        pass  # nobody is there any more
    take_for_hub(endpoint, tmp_path, monkeypatch)
    began = time.monotonic()
    assert hub.silent() == f"{endpoint} is out of reach: Connection refused"
    assert time.monotonic() - began < 2


def test_what_is_no_address_is_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_hub("nonsense", tmp_path, monkeypatch)
    assert re.search("protocol|scheme", str(hub.silent()))


def test_a_slow_hub_is_waited_for(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.seconds, stand_in.files[HELD] = 0.3, b"{}"
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "2")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 2)
    with hub.asked() as silence:
        assert silence is None
        assert Path(hf_hub_download("me/held", "config.json")).read_bytes() == b"{}"


def test_whatever_a_hub_says_it_answers(stand_in: StandIn) -> None:
    assert hub.silent() is None
    assert stand_in.asked == ["HEAD /"]  # answered with 404


def test_an_answer_holds_for_a_minute(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (hub.silent(), hub.silent(), len(stand_in.asked)) == (None, None, 1)
    monkeypatch.setattr(hub, "REMEMBERED", 0.0)
    assert (hub.silent(), len(stand_in.asked)) == (None, 2)


def test_offline_means_that_nothing_is_asked(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.silent() == "HF_HUB_OFFLINE is set"
    with hub.asked():
        assert constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE
    assert stand_in.asked == []


def test_a_proxy_is_used(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.delenv("NO_PROXY")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, stand_in.endpoint)
    close_sessions()
    assert hub.silent() is None
    assert stand_in.asked == ["HEAD http://hub.invalid/"]
    close_sessions()


def test_what_is_in_the_cache_is_found_while_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.2)
    datasets = SimpleNamespace(config=SimpleNamespace(HF_HUB_OFFLINE=False))
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    with hole() as endpoint:
        take_for_hub(endpoint, tmp_path, monkeypatch)
        held = put_in_cache("me/held", "config.json", "{}")
        began = time.monotonic()
        with hub.asked() as silence:
            assert datasets.config.HF_HUB_OFFLINE
            assert hf_hub_download("me/held", "config.json") == str(held)
            assert snapshot_download("me/held") == str(held.parent)
            with pytest.raises(Exception, match=r".") as failed:
                hf_hub_download("me/other", "config.json")
        assert time.monotonic() - began < 2
    assert hub.missing(failed.value)
    assert hub.failure(failed.value, silence) == f"{silence}, and it is not in the cache"
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_client_is_online_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    seen: list[bool] = []

    def fail() -> None:
        seen.append(constants.HF_HUB_OFFLINE)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"), hub.asked():
        fail()
    assert seen == [True]
    assert not constants.HF_HUB_OFFLINE


def test_no_model_is_made_for_weights_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(name: str, **_: Any) -> None:
        made.append(name)
        raise RuntimeError("made")

    monkeypatch.setattr("timm.create_model", make)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CorpError, match=r"out of reach: .*, and it is not in the cache\); without a network"):
        load_dense(ModelConfig("deit3_huge_patch14_224"))
    assert made == []
    put_in_cache(timm.get_pretrained_cfg("deit3_huge_patch14_224").hf_hub_id, "model.safetensors", "")
    with pytest.raises(CorpError, match="RuntimeError: made"):
        load_dense(ModelConfig("deit3_huge_patch14_224"))
    assert made == ["deit3_huge_patch14_224"]


def refusal(*asked: Any, **how: Any) -> str:
    """Why the hub's client does not get something."""
    with hub.asked() as silence, pytest.raises(Exception, match=r".") as failed:
        hf_hub_download(*asked, **how)
    return hub.failure(failed.value, silence)


def test_what_the_hub_refuses_is_told_apart(stand_in: StandIn) -> None:
    stand_in.files[HELD] = b"{}"
    stand_in.refuses = {"me/gated": (403, "GatedRepo"), "me/private": (401, "RepoNotFound")}
    assert refusal("me/gated", "config.json").startswith("it is gated: accept its terms")
    for name in ("me/private", "me/nothing"):
        assert refusal(name, "config.json").startswith("the hub has no such repository, or it is private")
    assert refusal("me/held", "config.json", revision="v9").startswith("the repository has no such revision")
    assert refusal("me/held", "weights") == "the repository has no such file"
    assert refusal("me/held/more", "weights").startswith("HFValidationError: Repo id")
