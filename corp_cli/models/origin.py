"""Where dense weights come from, and under which licence: as far as timm, the hub or this package says."""

from __future__ import annotations

from dataclasses import dataclass

import timm

from corp_cli.config.push import is_repository
from corp_cli.models.bundled import BUNDLED
from corp_cli.models.huggingface import PREFIX
from corp_cli.runtime import hub

HUB_PREFIXES = ("hf-hub:", PREFIX)


@dataclass(frozen=True)
class Origin:
    """Of dense weights; None where it is not known."""

    base_model: str | None = None  # owner/name on the hub
    license: str | None = None
    license_by: str = ""  # who says so


def origin_of(name: str, own_weights: bool) -> Origin:
    """The origin of the weights of model.name=`name`, of which nothing is known where they are the user's own."""
    if own_weights:
        return Origin()
    if name in BUNDLED:
        return Origin(None, "apache-2.0", "corp")
    for prefix in HUB_PREFIXES:
        repository = name.removeprefix(prefix).partition("@")[0]
        if name.startswith(prefix):
            return Origin(repository, license_on_hub(repository), "the hub") if is_repository(repository) else Origin()
    try:
        about = timm.get_pretrained_cfg(name)
    except RuntimeError:  # a tag of another version of timm
        return Origin()
    if about is None or not about.has_weights:
        return Origin()
    known = about.hf_hub_id if about.hf_hub_id and is_repository(about.hf_hub_id) else None
    return Origin(known, about.license, "timm")


def license_on_hub(repository: str) -> str | None:
    """The licence that the model card of a repository names; None where the hub does not say."""
    from huggingface_hub import model_info

    with hub.asked() as silence:
        if silence is not None:
            return None
        try:
            card = model_info(repository).card_data
        except Exception:  # what is asked for is a courtesy: the key license= says it as well
            return None
    found = card.get("license") if card else None
    return found if isinstance(found, str) else None
