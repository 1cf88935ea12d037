"""`corp` as a user types it: help, overrides, output folders, multirun."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import corp_cli
from corp_cli import commands
from corp_cli.cli.job import loaded
from corp_cli.cli.main import main
from corp_cli.cli.table import COMMANDS
from corp_cli.config.checkpoints import InfoConfig
from corp_cli.config.prune import PruneConfig
from corp_cli.errors import CorpError
from tests.support.typed import fail_with, files, put_module

pytestmark = pytest.mark.usefixtures("empty_folder")


# Help


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in out
        assert command.does in out
    assert "Examples:" in out


@pytest.mark.parametrize("argv", [["--version"], ["prune", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"corp {corp_cli.__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_prune_shows_groups_keys_and_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", flag]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n  compensation:\n    best +\S.*\n    none +No repair", out, re.DOTALL)
    assert "joint: null" in out
    assert "# hidden channels" in out  # the comment in the YAML explains the key
    assert "num_images: 1024" in out
    for word in ("Usage:", "Examples:", "--multirun", "--cfg job", "--config-dir", "-sc install="):
        assert word in out
    assert not files()


def test_help_follows_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "model=deit_base", "sparsity.mlp=0.25", "--help"]) == 0
    out = capsys.readouterr().out
    assert "name: deit_base_patch16_224" in out
    assert "mlp: 0.25" in out


def test_help_of_a_study_leaves_out_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "experiment=table3", "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n    rows: … +# .+\n(?: {20,}.+\n)*    values:", out)
    assert re.search(r"\n    paper: … +# ", out)
    assert "deit3_huge_patch14_224:" not in out


def test_help_of_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--help"]) == 0
    assert "corp info checkpoint=FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["--version"], ["prune", "--help"], ["info", "-h"], ["prune", "--cfg", "job"], ["prune", "a"]]
)
def test_no_torch_before_the_work_begins(argv: list[str]) -> None:
    code = "import sys; from corp_cli.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_command_is_loaded_without_looking_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it brought along is not looked through later."""
    put_module(monkeypatch, "info", commands)
    monkeypatch.delitem(sys.modules, "corp_cli.commands.info")
    before = gc.get_freeze_count()
    info = loaded("info")
    assert callable(info.run)
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    assert frozen > before
    assert loaded("info") is info
    assert gc.get_freeze_count() == frozen


def test_python_m_corp_cli() -> None:
    done = subprocess.run([sys.executable, "-m", "corp_cli", "prun"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"corp: There is no command prun, only {', '.join(COMMANDS)}; did you mean prune?\n"


def test_hydra_help_and_info(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "corp_cli", "prune"]
    for flags, expected in ((["--hydra-help"], "--multirun"), (["--info", "searchpath"], "configs")):
        done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
        assert expected in done.stdout
        assert done.stderr == ""


# Runs


def test_prune_hands_over_the_typed_config(runs: list[tuple[PruneConfig, Path]]) -> None:
    assert main(["prune", "model=deit_tiny", "sparsity.joint=0.25", "+model.args.img_size=384"]) == 0
    (cfg, output_dir), *others = runs
    assert not others
    assert isinstance(cfg, PruneConfig)
    assert cfg.model.name == "deit_tiny_patch16_224"
    assert cfg.model.args == {"img_size": 384}
    assert cfg.sparsity.joint == 0.25
    assert output_dir.is_absolute()
    assert output_dir.parent == Path("outputs/deit_tiny_patch16_224").absolute()


def test_prune_writes_only_its_output_folder(
    runs: list[tuple[PruneConfig, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ), list(sys.argv)
    assert main(["prune"]) == 0
    hydra = [f".hydra/{name}" for name in ("config.yaml", "hydra.yaml", "overrides.yaml", "resume.json")]
    written = [str(runs[0][1].relative_to(Path.cwd()) / name) for name in (*hydra, "prune.log", "pruned.safetensors")]
    assert files() == written
    assert (dict(os.environ), sys.argv) == before
    assert capsys.readouterr() == ("", "")


def test_runs_of_the_same_second_are_kept_apart(runs: list[tuple[PruneConfig, Path]]) -> None:
    assert [main(["prune"]) for _ in range(3)] == [0, 0, 0]
    assert len({output_dir for _, output_dir in runs}) == 3


def test_flags_may_stand_between_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "seed=3", "--cfg", "job", "sparsity.qk=0.5"]) == 0
    out = capsys.readouterr().out
    assert "seed: 3" in out
    assert "qk: 0.5" in out
    assert not files()


def test_own_config_needs_no_defaults_list(runs: list[tuple[PruneConfig, Path]]) -> None:
    Path("my.yaml").write_text("seed: 7\nsparsity: {mlp: 0.25}\n")
    assert main(["prune", "--config-dir", ".", "--config-name", "my", "sparsity.qk=0.5", "ranker=random"]) == 0
    ((cfg, _),) = runs
    assert (cfg.seed, cfg.sparsity.mlp, cfg.sparsity.qk, cfg.ranker.mlp) == (7, 0.25, 0.5, "random")


def test_group_that_such_a_config_sets_cannot_be_chosen_anew(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("model: {name: deit_tiny_patch16_224}\n")
    assert main(["prune", "--config-dir", ".", "--config-name", "my", "model=deit_base"]) == 2
    assert "my.yaml sets all of model already" in capsys.readouterr().err
    assert files() == ["my.yaml"]


def test_saved_config_runs_the_same_again(runs: list[tuple[PruneConfig, Path]]) -> None:
    assert main(["prune", "model=deit_tiny", "seed=3", "+model.args.img_size=384", "recipe=paper"]) == 0
    saved = runs[0][1] / ".hydra"
    assert main(["prune", "--config-dir", str(saved), "--config-name", "config"]) == 0
    assert main(["prune", f"--config-dir={saved}", "-cn=config.yaml", "seed=4"]) == 0
    assert runs[1][0] == runs[0][0]
    assert runs[2][0] == replace(runs[0][0], seed=4)
    assert len({output_dir for _, output_dir in runs}) == 3


def test_saved_config_of_a_job_can_be_swept(runs: list[tuple[PruneConfig, Path]]) -> None:
    assert main(["prune", "-m", "seed=1"]) == 0
    saved = str(runs[0][1] / ".hydra")
    assert main(["prune", "-m", "--config-dir", saved, "--config-name", "config", "sparsity.mlp=0.25,0.5"]) == 0
    assert [(cfg.seed, cfg.sparsity.mlp) for cfg, _ in runs[1:]] == [(1, 0.25), (1, 0.5)]


def test_own_configs(runs: list[tuple[PruneConfig, Path]]) -> None:
    Path("mine/model").mkdir(parents=True)
    Path("mine/my.yaml").write_text("defaults: [prune, _self_]\nseed: 7\n")
    Path("mine/model/net.yaml").write_text("name: my_net\n")
    assert main(["prune", "--config-dir", "mine", "--config-name", "my", "model=net"]) == 0
    assert runs[0][0].seed == 7
    assert runs[0][0].model.name == "my_net"


def test_info_describes_the_file_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[InfoConfig] = []
    put_module(monkeypatch, "info", commands, run=lambda cfg, output_dir: described.append(cfg))
    assert main(["info", "checkpoint=outputs/x/pruned.safetensors"]) == 0
    assert described == [InfoConfig("outputs/x/pruned.safetensors")]
    assert not list(Path().iterdir())


# Multirun


def test_multirun_runs_every_job(runs: list[tuple[PruneConfig, Path]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "-m", "sparsity.joint=0.25,0.5"]) == 0
    assert [cfg.sparsity.joint for cfg, _ in runs] == [0.25, 0.5]
    assert [output_dir.name for _, output_dir in runs] == ["0", "1"]
    assert runs[0][1].parents[1] == Path("outputs/multirun").absolute()
    captured = capsys.readouterr()
    assert "job 1 (sparsity.joint=0.5)" in captured.out
    assert captured.err == ""


def test_multirun_goes_on_after_a_failed_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(cfg: PruneConfig, output_dir: Path, shared: Path) -> None:
        if cfg.seed != 2:
            raise CorpError("no such luck.") if cfg.seed == 1 else ValueError("bug")
        (output_dir / "pruned.safetensors").touch()

    put_module(monkeypatch, "prune", commands, run=run)
    assert main(["prune", "-m", "seed=1,2,3"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "corp: job 0 (seed=1): no such luck."
    assert err[1].startswith("corp: job 2 (seed=3): unexpected error: ValueError: bug;")
    assert len(err) == 2
    (sweep,) = Path("outputs/multirun").iterdir()
    assert sorted(path.name for path in sweep.iterdir()) == ["1", "2", "multirun.yaml", "summary.csv"]


def test_multirun_that_fails_throughout_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, CorpError("no."))
    assert main(["prune", "-m", "seed=1,2"]) == 2
    assert not list(Path().iterdir())


def test_multirun_set_in_a_config(runs: list[tuple[PruneConfig, Path]]) -> None:
    params = "hydra: {mode: MULTIRUN, sweeper: {params: {seed: '1,2'}}}"
    Path("my.yaml").write_text(f"defaults: [prune, _self_]\n{params}\n")
    assert main(["prune", "--config-dir", ".", "--config-name", "my"]) == 0
    assert [cfg.seed for cfg, _ in runs] == [1, 2]


def test_multirun_that_is_interrupted_has_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cfg: PruneConfig, output_dir: Path, shared: Path) -> None:
        if cfg.seed == 2:
            raise KeyboardInterrupt
        (output_dir / "pruned.safetensors").touch()

    put_module(monkeypatch, "prune", commands, run=run)
    assert main(["prune", "-m", "seed=1,2,3", "hydra.sweep.dir=sweep"]) == 130
    first, second = Path("sweep/summary.csv").read_text().splitlines()[1:]
    assert first.startswith("0,seed=1,ok,")
    assert second.startswith("1,seed=2,failed,")
    assert second.endswith("KeyboardInterrupt")


def test_hydra_may_change_the_folder_but_not_where_paths_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    put_module(monkeypatch, "prune", commands, run=lambda cfg, output_dir: folders.append(Path.cwd()))
    assert main(["prune", "hydra.job.chdir=true"]) == 0
    assert folders == [Path.cwd()]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_key_and_choice_within_80_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for line in text.splitlines():
        assert len(line) <= 80 or line.startswith("  corp "), line
    keys = text.partition("\nKeys and")[2].partition("\nFlags")[0]
    for line in keys.splitlines()[1:]:
        if re.match(r" +\w+: ", line):  # neither a section, nor an entry of a list, nor a note that goes on
            assert "  # " in line, line
    for line in text.partition("\nGroups")[2].partition("\nKeys")[0].splitlines()[1:]:
        assert line.endswith(":") or re.match(r" {4}\S+ {2,}\S|  +", line), line
