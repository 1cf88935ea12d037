"""The Hugging Face hub: whether it answers is found in seconds, where its own client would try again for a minute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corp_cli.errors import causes

SECONDS = 5.0  # for the hub to answer; the client's own variable HF_HUB_ETAG_TIMEOUT sets another number
ADDRESSES = 3  # of the hub that may be tried in that time: where IPv6 leads nowhere, IPv4 must get its turn
REMEMBERED = 60.0  # seconds that an answer holds
_answers: dict[str, tuple[float, str | None]] = {}  # endpoint → when it was asked, and what was wrong


@contextlib.contextmanager
def asked() -> Iterator[str | None]:
    """For the duration, take from the hub's cache what is there, and ask the hub only where it answers.

    Yields why it does not, None where it does. The hub's client and the package datasets then behave as with
    HF_HUB_OFFLINE=1: what is in the cache is found, and the rest is missing at once.
    """
    from huggingface_hub import constants

    silence = silent()
    datasets: Any = sys.modules.get("datasets")
    places = [constants] if datasets is None else [constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    if silence is not None:
        _set_offline(places, [True] * len(places))
    try:
        yield silence
    finally:
        if silence is not None:
            _set_offline(places, before)


def silent() -> str | None:
    """Why the hub cannot be asked, None where it answers: looked up, or found out in at most SECONDS."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint, now = constants.ENDPOINT, time.monotonic()
    when, silence = _answers.get(endpoint, (-REMEMBERED, None))
    if now - when >= REMEMBERED:
        silence = unreachable(endpoint)
        _answers[endpoint] = now, silence
    return silence and f"{endpoint} is out of reach: {silence}"


def held(repository: str) -> bool:
    """Whether the cache of the hub's client holds any file of `repository`, which may name a revision behind an @."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository.partition("@")[0], repo_type="model")
    return any(Path(constants.HF_HUB_CACHE, name, "snapshots").glob("*/*"))


def unreachable(url: str) -> str | None:
    """Why `url` does not answer the hub's client; None where it does, whatever it says.

    The client knows of proxies and certificates. It is asked in a thread, since looking up a name takes as long as the
    system likes.
    """
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # its old and new place

    seconds, found = patience(), list[str | None]()
    limits: Any = (seconds / ADDRESSES, seconds)  # to connect, to answer

    def ask() -> None:
        try:
            get_session().head(url, timeout=limits)
            found.append(None)
        except Exception as error:  # the client's HTTP library has changed twice; below all lies the same cause
            found.append(_cause(error))

    thread = threading.Thread(target=ask, name="corp-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"no answer in {seconds:g} s"


def patience() -> float:
    """Seconds to wait for the hub: those of HF_HUB_ETAG_TIMEOUT where that is set."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_ETAG_TIMEOUT) if os.environ.get("HF_HUB_ETAG_TIMEOUT") else SECONDS


def missing(error: Exception) -> bool:
    """Whether `error` says that the hub gave no answer, and that its cache does not hold what is sought."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # their old and new place
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    return isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled)


def not_held(silence: str) -> str:
    """Why there is nothing to be had, where `asked` yielded `silence`."""
    return f"{silence}, and it is not in the cache"


def failure(error: Exception, silence: str | None) -> str:
    """In a few words, why the hub did not give what it was asked for; `silence` is what `asked` yielded."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # their old and new place
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if silence is not None and missing(error):
        return not_held(silence)
    if isinstance(error, GatedRepoError):
        return "it is gated: accept its terms on its page of the hub and log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repository, or it is private: check the name, or log in with `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision: check what stands behind the @"
    if isinstance(error, EntryNotFoundError) and not missing(error):
        return "the repository has no such file"
    return f"{type(error).__name__}: {in_short(error)}"


def in_short(error: BaseException) -> str:
    """The first line of an error, after its type where that is all there is."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def _cause(error: BaseException) -> str:
    """What lies below `error`: a name that is not known, a connection that was refused."""
    first = causes(error)[-1]
    return getattr(first, "strerror", None) or in_short(first)


def _set_offline(places: list[Any], values: list[bool]) -> None:
    """Tell the hub's client, whose sessions before version 1.0 must be made anew to notice."""
    from huggingface_hub import utils

    for place, value in zip(places, values, strict=True):
        place.HF_HUB_OFFLINE = value
    if hasattr(utils, "reset_sessions"):
        utils.reset_sessions()
