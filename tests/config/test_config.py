"""The schema, the YAML files and `load_config`: what can be set, what is refused, what wins."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import corp_cli
from corp_cli.cli.compose import config_dir, slug
from corp_cli.config.checkpoints import BenchConfig, InfoConfig
from corp_cli.config.export import FORMATS
from corp_cli.config.gate import GateConfig
from corp_cli.config.prune import RANKERS, CompensationConfig, PruneConfig, SparsityConfig
from corp_cli.errors import CorpError
from tests.support.recipes import PAPER_COMPENSATION

load_config = corp_cli.load_config

GROUPS = {item.name: item.default_factory for item in fields(PruneConfig) if is_dataclass(item.default_factory)}
CHOICES = sorted(path for group in GROUPS for path in (config_dir() / group).glob("*.yaml"))
OF_CHECK = ("gate=default", "gate=strict")
TIMM_CHOICES = [path.stem for path in sorted((config_dir() / "model").glob("*.yaml")) if path.stem != "vit_digits"]


def names(choices: list[Path]) -> list[str]:
    return [f"{path.parent.name}={path.stem}" for path in choices]


def test_defaults_of_the_yaml_files_are_those_of_the_schema() -> None:
    assert load_config() == PruneConfig()


@pytest.mark.parametrize("path", CHOICES, ids=names(CHOICES))
def test_every_key_is_visible_in_every_choice(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.startswith("# ")
    group: Any = GROUPS[path.parent.name]
    if path.parent.name == "gate" and path.stem != "none":
        group = GateConfig  # of corp check
    assert list(OmegaConf.load(path)) == [item.name for item in fields(group)]


@pytest.mark.parametrize("choice", [name for name in names(CHOICES) if name not in OF_CHECK])
def test_every_choice_composes(choice: str) -> None:
    config = load_config(choice)
    group, _, name = choice.partition("=")
    if group == "ranker":
        for units, known in RANKERS.items():
            assert getattr(config.ranker, units) == (name if name in known else "activation")


@pytest.mark.parametrize("choice", TIMM_CHOICES)
def test_every_model_is_in_timm(choice: str) -> None:
    timm = pytest.importorskip("timm")
    assert timm.is_model(load_config(f"model={choice}").model.name)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ("none", "none", "none")),
        ("mean", ("mean", "none", "mean")),
        ("paper", ("affine", "sylvester", "affine")),
    ],
)
def test_compensation(choice: str, expected: tuple[str, str, str]) -> None:
    assert load_config(f"compensation={choice}").compensation == CompensationConfig(
        *expected, ridge_lambda=1e-3, propagate="none"
    )


def test_one_word_does_for_a_list() -> None:
    assert load_config("export.formats=onnx").export == load_config("export.formats=[onnx]").export
    for name in FORMATS:
        assert load_config(f"export={name}").export.formats == load_config(f"export.formats={name}").export.formats
    assert BenchConfig("a", dtypes="float16").dtypes == ["float16"]


def test_recipes() -> None:
    assert load_config("recipe=best") == load_config()
    paper = load_config("recipe=paper")
    assert (paper.recipe, paper.ranker.mlp, paper.compensation) == ("paper", "activation", PAPER_COMPENSATION)
    assert (paper.sparsity.skip_unread, paper.sparsity.merge_tokens) == (False, False)


def test_any_timm_name() -> None:
    assert load_config("model.name=hf-hub:timm/some_vit.in1k").model.name == "hf-hub:timm/some_vit.in1k"


# What wins: the schema < the choice of a group < the recipe's choices < the command line's.


@pytest.mark.parametrize("overrides", [("recipe=paper", "ranker=magnitude"), ("ranker=magnitude", "recipe=paper")])
def test_choice_wins_over_recipe(overrides: tuple[str, ...]) -> None:
    config = load_config(*overrides)
    assert config.recipe == "paper"
    assert config.ranker.mlp == "magnitude"
    assert config.compensation.qk == "sylvester"


def test_key_wins_over_choice() -> None:
    config = load_config("compensation.vo=none", "compensation=mean", "model.name=x", "model=deit_tiny")
    assert (config.compensation.mlp, config.compensation.vo) == ("mean", "none")
    assert config.model.name == "x"


# Ranges


@pytest.mark.parametrize("key", ["joint", "mlp", "qk", "vo", "heads"])
@pytest.mark.parametrize("value", ["-0.1", "1", "1.5", "inf", "nan"])
def test_fraction_out_of_range(key: str, value: str) -> None:
    with pytest.raises(CorpError, match=rf"sparsity\.{key}=.* is out of range"):
        load_config(f"sparsity.{key}={value}")


@pytest.mark.parametrize(
    ("override", "low"),
    [
        ("sparsity.round_to=0", 1),
        ("compensation.ridge_lambda=-1e-3", 0),
        ("calibration.num_images=0", 1),
        ("calibration.batch_size=0", 1),
        ("calibration.num_workers=-1", 0),
        ("evaluation.num_images=0", 1),
        ("evaluation.batch_size=-4", 1),
        ("evaluation.num_workers=-1", 0),
        ("evaluation.throughput_batches=-1", 0),
        ("seed=-1", 0),
    ],
)
def test_number_out_of_range(override: str, low: int) -> None:
    key = override.partition("=")[0]
    with pytest.raises(CorpError, match=rf"^{key}=.* is out of range; it must be at least {low}\.$"):
        load_config(override)
    load_config(f"{key}={low}")


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("compensation.ridge_lambda=inf", "0 to 1000000"),
        ("compensation.class_token_weight=1e300", "0 to 1000000"),
        ("calibration.batch_size=1000000000", "1 to 65536"),
        ("evaluation.batch_size=1000000000", "1 to 65536"),
        ("evaluation.num_workers=100000", "0 to 1024"),
        ("evaluation.throughput_batches=10000000000", "0 to 1000000000"),
        ("data.crop_pct=1e-9", "0.1 to 1"),
        ("seed=18446744073709551616", "0 to 9223372036854775807"),
    ],
)
def test_number_beyond_all_reason(override: str, allowed: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(CorpError, match=rf"^{key}=.* is out of range; it must be from {allowed}\.$"):
        load_config(override)


@pytest.mark.parametrize("key", ["ridge_lambda", "class_token_weight", "alpha", "beta", "token_floor"])
def test_nan_is_no_number(key: str) -> None:
    with pytest.raises(CorpError, match=rf"^compensation\.{key}=nan is out of range"):
        load_config(f"compensation.{key}=nan")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ranker.vo=weights", "ranker.vo=weights is not a choice; use one of activation, magnitude, random."),
        (
            "compensation.qk=affine",
            "compensation.qk=affine is not a choice; use one of none, sylvester, lowrank, weighted_lowrank.",
        ),
        ("modl=deit_tiny", "corp prune has no key modl; did you mean model?"),
        ("sparsity.joint=abc", "sparsity.joint=abc is not valid; sparsity.joint must be a number."),
        ("+sparsity.jiont=0.5", "corp has no key sparsity.jiont; leave it out, or see corp prune --help"),
    ],
)
def test_load_config_says_what_is_wrong(override: str, message: str) -> None:
    with pytest.raises(CorpError) as caught:
        load_config(override)
    assert str(caught.value) == message


@pytest.mark.parametrize("other", [{"mlp": 0.5}, {"qk": 0.0}])
def test_joint_excludes_mlp_and_qk(other: dict[str, Any]) -> None:
    with pytest.raises(CorpError, match=r"sparsity\.joint sets both"):
        SparsityConfig(joint=0.5, **other)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"mlp": 0.0, "qk": 0.0, "vo": 0.0, "heads": 0.0}),
        ({"joint": 0.25}, {"mlp": 0.25, "qk": 0.25, "vo": 0.0, "heads": 0.0}),
        ({"joint": 0.25, "vo": 0.5}, {"mlp": 0.25, "qk": 0.25, "vo": 0.5, "heads": 0.0}),
        ({"mlp": 0.5}, {"mlp": 0.5, "qk": 0.0, "vo": 0.0, "heads": 0.0}),
        ({"heads": 0.0}, {"mlp": 0.0, "qk": 0.0, "vo": 0.0, "heads": 0.0}),
    ],
)
def test_fractions(given: dict[str, Any], expected: dict[str, float]) -> None:
    assert SparsityConfig(**given).fractions() == expected


def test_info_needs_a_checkpoint() -> None:
    with pytest.raises(CorpError, match="corp info checkpoint="):
        InfoConfig()


# The name of the output folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deit_tiny_patch16_224", "deit_tiny_patch16_224"),
        ("hf-hub:timm/vit.in1k", "hf-hub_timm_vit.in1k"),
        ("..", "_"),
        ("", "_"),
    ],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


@given(st.text())
def test_slug_names_one_folder(name: str) -> None:
    folder = slug(name)
    assert Path(folder).parts == (folder,)
    assert folder not in (".", "..")


# The package


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, corp_cli; corp_cli.load_config; corp_cli.CorpError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_exports() -> None:
    assert set(corp_cli.__all__) <= set(dir(corp_cli))
    for name in corp_cli.__all__:
        assert getattr(corp_cli, name) is not None
    with pytest.raises(AttributeError, match="nope"):
        _ = corp_cli.nope
