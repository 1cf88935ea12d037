"""docs/sweeps.md: its commands compose where their plugins are installed, and its config groups are found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from corp_cli.cli.hydra_app import check, config_loader, parse_flags
from corp_cli.cli.main import main
from corp_cli.cli.saved import lay_over, take_config
from corp_cli.config.outcome import OBJECTIVES, TRACKERS
from corp_cli.config.prune import PruneConfig
from tests.support.documents import code_blocks, commands, in_backticks, read, write_yaml

PAGE = read("docs/sweeps.md")
SHOWN = commands("".join(block.body for block in code_blocks(PAGE) if block.language == "sh"))
PLUGINS = {"joblib": "joblib_launcher", "submitit": "submitit_launcher", "cluster": "submitit_launcher"}
PLUGINS |= {"optuna": "optuna_sweeper"}

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.parametrize("argv", SHOWN, ids=" ".join)
@pytest.mark.filterwarnings("default")  # of the plugins
def test_command_composes(argv: list[str]) -> None:
    write_yaml(PAGE, Path())
    for word, plugin in PLUGINS.items():
        if any(word in arg for arg in argv):
            missing = find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.hydra_{plugin}") is None
            if missing:
                pytest.skip(f"hydra_{plugin} is not installed")
    command, *args = argv
    args = [arg.replace("/shared/", "shared/") for arg in args]
    flags = parse_flags(command, [*args, "hydra.sweep.dir=sweep"] if "cluster" in args else args)
    path = take_config(flags)
    loader = config_loader(flags.config_dir)
    if path is not None:
        lay_over(command, path, flags, loader)
    assert check(command, flags, loader).multirun == ("-m" in args)


def test_there_is_something_to_test() -> None:
    assert len(SHOWN) >= 6
    assert {word for word in PLUGINS if any(word in arg for argv in SHOWN for arg in argv)} == set(PLUGINS)


def test_config_groups_of_a_search_path_are_chosen(runs: list[tuple[PruneConfig, Path]]) -> None:
    """The example as it is typed, and the same folder named in a config of the user's own."""
    write_yaml(PAGE, Path())
    (argv,) = [argv for argv in SHOWN if any("searchpath" in arg for arg in argv)]
    assert main(argv) == 0
    own = f"defaults: [prune, _self_, {{override model: ours}}]\nhydra: {{searchpath: ['file://{Path('groups').absolute()}']}}\n"
    Path("conf/own.yaml").write_text(own)
    assert main(["prune", "--config-dir", "conf", "--config-name", "own", "sparsity=light"]) == 0
    for cfg, _ in runs:
        assert (cfg.model.name, cfg.model.args) == ("vit_small_patch16_224", {"num_classes": 37})
        assert (cfg.sparsity.macs, cfg.sparsity.merge_tokens, cfg.sparsity.round_to) == (0.2, False, 8)


def test_choices_are_those_of_the_config() -> None:
    for heading, known in (("`objective`", OBJECTIVES), ("tracker", TRACKERS)):
        _, _, after = PAGE.partition(f"\n| {heading} |")
        first = [line.split("|")[1] for line in after.partition("\n\n")[0].splitlines()[2:]]
        assert [in_backticks(cell)[0] for cell in first] == list(known)
