"""Pruned checkpoints on the Hugging Face hub: taken from its cache, or fetched into it. Safetensors alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corp_cli.errors import CorpError
from corp_cli.files.manifest import read_manifest
from corp_cli.files.shards import INDEX, parts_of
from corp_cli.runtime import hub
from corp_cli.version import __version__

ON_HUB = "hf-hub:"
WEIGHTS = "model.safetensors"  # what timm and the hub call a file of weights


def fetched(path: str | os.PathLike[str]) -> Path:
    """The file `path`; for hf-hub:OWNER/NAME or hf-hub:OWNER/NAME@REVISION, a pruned checkpoint in the hub's cache.

    Raises CorpError where the hub does not give it, and where what it gives is no pruned checkpoint.
    """
    if not (asked := str(path)).startswith(ON_HUB):
        return Path(path)
    repository, _, revision = asked.removeprefix(ON_HUB).partition("@")
    file = from_hub(repository, revision or None)
    try:
        read_manifest(file)
    except CorpError as error:
        raise CorpError(
            f"{asked} holds no pruned checkpoint that corp can read ({error}); give a repository that corp push made, "
            f"or model.name={asked} for a dense model of timm."
        ) from error
    return file


def from_hub(repository: str, revision: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The weights of a `repository`, as a file of the hub's cache. Raises CorpError where they are out of reach."""
    from huggingface_hub import hf_hub_download

    at = f"{repository}@{revision}" if revision else repository
    about: Any = {"revision": revision, "cache_dir": cache_dir, "library_name": "corp", "library_version": __version__}
    with hub.asked() as silence:
        try:
            return _downloaded(lambda name: Path(hf_hub_download(repository, name, **about)))
        except Exception as error:
            advice = "check the name"
            if hub.missing(error):
                advice = "download it elsewhere and give checkpoint=FILE, or fill the hub's cache (HF_HOME)"
            why = hub.failure(error, silence)
            raise CorpError(f"The pruned weights of {ON_HUB}{at} cannot be fetched ({why}); {advice}.") from error


def _downloaded(download: Callable[[str], Path]) -> Path:
    """The weights of a repository in one file, or the index of their shards."""
    from huggingface_hub.utils import EntryNotFoundError  # type: ignore[attr-defined]  # their old and new place

    try:
        return download(WEIGHTS)
    except EntryNotFoundError as error:
        missing = error
    try:
        index = download(WEIGHTS + INDEX)
    except EntryNotFoundError:
        raise missing from None
    for part in parts_of(index):
        download(part.name)
    return index
