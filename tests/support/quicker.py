"""What timm, Hydra and corp do again and again in tests, done once, with the same outcome: most of a small run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import DictConfig
from timm.layers import weight_init

from corp_cli.cli import hydra_app
from corp_cli.cli.compose import config_dir
from corp_cli.cli.messages import LAID_OVER
from corp_cli.measure.results import Count
from corp_cli.models import loaded
from corp_cli.models.counts import count
from corp_cli.models.spec import ModelSpec, PrunedSizes
from corp_cli.sizes import costs


def draw_no_weights_on_meta(patch: pytest.MonkeyPatch) -> None:
    """There are no values to draw; timm's drawing there takes half of the time of counting MACs."""
    draw = weight_init._trunc_normal_
    patch.setattr(
        weight_init, "_trunc_normal_", lambda tensor, *args: tensor if tensor.is_meta else draw(tensor, *args)
    )


def remember_counts(patch: pytest.MonkeyPatch) -> None:
    """Runs of the same small models count the same sizes, a dozen of them for a budget."""
    known: dict[str, Count] = {}

    def counted(spec: ModelSpec, blocks: Mapping[str, PrunedSizes]) -> Count:
        key = repr((spec, dict(blocks)))
        if key not in known:
            known[key] = count(spec, blocks)
        return known[key]

    for module in (loaded, costs):
        patch.setattr(module, "count", counted)


def find_the_mode_once(patch: pytest.MonkeyPatch) -> None:
    """Hydra composes the whole config only to read its mode, which corp's check has read just before."""
    check, found = hydra_app.check, [RunMode.RUN]

    def checked(*args: Any) -> hydra_app.Ground:
        ground = check(*args)
        found[0] = RunMode.MULTIRUN if ground.multirun else RunMode.RUN
        return ground

    patch.setattr(hydra_app, "check", checked)
    patch.setattr(Hydra, "get_mode", lambda *_, **__: found[0])


def copy_no_schemas(patch: pytest.MonkeyPatch) -> None:
    """Every composition copies all that is stored, with the repository that refers to it, and changes nothing of it."""
    patch.setattr(ConfigStore, "__deepcopy__", lambda self, memo: self, raising=False)


def remember_compositions(patch: pytest.MonkeyPatch) -> None:
    """The same choices of corp's own configs give the same defaults list, and the same config before overrides."""
    list_defaults, compose = defaults_list._create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[str, tuple[Any, dict[str, Any]]] = {}
    configs: dict[str, DictConfig] = {}

    def listed(repo: Any, config_name: Any, overrides: Any, **how: Any) -> Any:
        if not only_corps(repo, str(config_name)):
            return list_defaults(repo, config_name, overrides, **how)
        choices = {name: value for name, value in vars(overrides).items() if name != "config_overrides"}
        key = repr((sources(repo), config_name, choices, how))
        if key not in lists:
            made = list_defaults(repo, config_name, overrides, **how)
            lists[key] = made, copy.deepcopy({name: vars(overrides)[name] for name in choices})
        made, choices = lists[key]
        vars(overrides).update(copy.deepcopy(choices))
        return made

    def composed(self: ConfigLoaderImpl, defaults: Any, repo: Any) -> DictConfig:
        if not only_corps(repo, *(str(default.config_path) for default in defaults)):
            return compose(self, defaults=defaults, repo=repo)
        key = repr((sources(repo), defaults))
        if key not in configs:
            configs[key] = compose(self, defaults=defaults, repo=repo)
        return copy.deepcopy(configs[key])

    patch.setattr(defaults_list, "_create_defaults_list", listed)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composed)


def sources(repo: Any) -> list[tuple[str, str]]:
    """(who gave it, where it is) of all that a config is looked for in."""
    return [(source.provider, source.path) for source in repo.get_sources()]


def only_corps(repo: Any, *names: str) -> bool:
    """No folder but corp's own, which no test changes, and no config that a run saved."""
    own = f"file://{config_dir().resolve()}"
    return not any(name.endswith(LAID_OVER) for name in names) and all(
        path == own or not (path.startswith("file:") or provider == "command-line") for provider, path in sources(repo)
    )
