"""`corp` as a user types it: help, overrides, mistakes, output folders, multirun, completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Callable

import pytest

import corp_cli
from corp_cli import commands
from corp_cli.cli import COMMANDS, main
from corp_cli.completion import candidates
from corp_cli.config import PruneConfig
from corp_cli.errors import CorpError

Pipeline = Callable[[PruneConfig, Path], None]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORP_DEBUG", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def put_module(
    monkeypatch: pytest.MonkeyPatch, name: str, package: ModuleType = corp_cli, **functions: Callable[..., None]
) -> None:
    """Let `from <package> import <name>` find a module with these functions: no torch, no model."""
    module = ModuleType(f"{package.__name__}.{name}")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, name, module, raising=False)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PruneConfig, Path]]:
    """What the pipeline was asked to run, in order; each run writes one file."""
    asked: list[tuple[PruneConfig, Path]] = []

    def run(cfg: PruneConfig, output_dir: Path, cache: Path | None) -> None:
        asked.append((cfg, output_dir))
        (output_dir / "pruned.safetensors").touch()

    put_module(monkeypatch, "pipeline", run=run)
    return asked


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, leaving: str = "") -> None:
    """Let every run raise `error`, after it has written the file `leaving`."""

    def run(cfg: PruneConfig, output_dir: Path, cache: Path | None) -> None:
        if leaving:
            (output_dir / leaving).touch()
        raise error

    put_module(monkeypatch, "pipeline", run=run)


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


# Help


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for command, does in COMMANDS.items():
        assert command in out
        assert does in out
    assert "Examples:" in out


@pytest.mark.parametrize("argv", [["--version"], ["prune", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"corp {corp_cli.__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_prune_shows_groups_keys_and_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", flag]) == 0
    out = capsys.readouterr().out
    assert "compensation: best, mean, none, paper" in out
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


def test_help_of_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--help"]) == 0
    assert "corp info checkpoint=FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["--version"], ["prune", "--help"], ["info", "-h"], ["prune", "--cfg", "job"], ["prune", "a"]]
)
def test_no_torch_before_the_work_begins(argv: list[str]) -> None:
    code = "import sys; from corp_cli.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


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
    hydra = [f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")]
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
    described: list[str] = []
    put_module(monkeypatch, "info", commands, describe=described.append)
    assert main(["info", "checkpoint=outputs/x/pruned.safetensors"]) == 0
    assert described == ["outputs/x/pruned.safetensors"]
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
    def run(cfg: PruneConfig, output_dir: Path, cache: Path | None) -> None:
        if cfg.seed != 2:
            raise CorpError("no such luck.") if cfg.seed == 1 else ValueError("bug")
        (output_dir / "pruned.safetensors").touch()

    put_module(monkeypatch, "pipeline", run=run)
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


def test_error_in_the_process_of_a_launcher_reaches_hydra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, CorpError("no images."))
    pids = iter(range(100))
    monkeypatch.setattr("corp_cli.cli.os.getpid", lambda: next(pids))
    assert main(["prune"]) == 2
    assert capsys.readouterr().err.endswith("corp: no images.\n")


# Mistakes: argv → words that the one line on stderr must hold

CHOICES = ["deit_base", "vit_digits", "vit_tiny"]
MISTAKES = [
    (["prun"], ["prun", "did you mean prune?"]),
    (["shrink"], ["shrink", ", ".join(COMMANDS)]),
    (["model=deit_tiny"], ["corp prune model=deit_tiny"]),
    (["-m", "prune"], ["-m", "must follow a command"]),
    (["prune", "modl=deit_tiny"], ["no key modl", "did you mean model?"]),
    (["prune", "model=deit_tny"], ["model=deit_tny", "did you mean deit_tiny?", *CHOICES]),
    (["prune", "model=deit_tiny_patch16_224"], ["model=deit_tiny_patch16_224", "model.name", *CHOICES]),
    (["prune", "model=5"], ["model=5", *CHOICES]),
    (["prune", "model=null"], ["model=null", *CHOICES]),
    (["prune", "-m", "model=deit_tiny,deit_tny"], ["model=deit_tny", "did you mean deit_tiny?"]),
    (["prune", "recipe=foo"], ["recipe=foo", "choose best or paper"]),
    (["prune", "sparsity=0.5"], ["sparsity=0.5", "uniform", "sparsity.joint"]),
    (["prune", "calibration=/photos"], ["calibration=/photos", "folder", "calibration.path"]),
    (["prune", "hydra/launcher=joblib"], ["hydra/launcher=joblib", "basic"]),
    (["prune", "sparsity.jiont=0.5"], ["no key sparsity.jiont", "did you mean sparsity.joint?"]),
    (["prune", "sparsity.zzzzzz=1"], ["no key sparsity.zzzzzz", "sparsity.mlp"]),
    (["prune", "zzzzzz=1"], ["no key zzzzzz", "model.name", "seed"]),
    (["prune", "joint=0.5"], ["no key joint", "did you mean sparsity.joint?"]),
    (["prune", "mlp=0.5"], ["sparsity.mlp, ranker.mlp or compensation.mlp"]),
    (["prune", "+sparsity.jiont=0.5"], ["no key sparsity.jiont"]),
    (["prune", "++foo=1"], ["no key foo"]),
    (["prune", "+model.name=x"], ["model.name", "leave out the +"]),
    (["prune", "~sparsity.joint"], ["sparsity.joint"]),
    (["prune", "model.args.img_size=384"], ["+model.args.img_size=384"]),
    (["prune", "hydra.rum.dir=x"], ["hydra.rum.dir", "--hydra-help"]),
    (["prune", "sparsity.joint=abc"], ["sparsity.joint=abc", "a number"]),
    (["prune", "seed=1.5"], ["seed=1.5", "a whole number"]),
    (["prune", "seed=null"], ["seed=null", "must have a value"]),
    (["prune", "model.pretrained=maybe"], ["model.pretrained=maybe", "true or false"]),
    (["prune", "model.name=[a,b]"], ["model.name"]),
    (["prune", "seed=${nope}"], ["seed", "nope"]),
    (["prune", "sparsity.joint=1"], ["sparsity.joint=1 is out of range"]),
    (["prune", "-m", "sparsity.joint=0.5,-1"], ["sparsity.joint=-1 is out of range"]),
    (["prune", "sparsity.joint=0.5", "sparsity.mlp=0.5"], ["sparsity.joint", "sparsity.mlp"]),
    (["prune", "ranker.mlp=foo"], ["ranker.mlp=foo", "activation, magnitude, random"]),
    (["prune", "sparsity.joint=0.25,0.5"], ["sparsity.joint=0.25,0.5", "add -m"]),
    (["prune", "seed=range(3)"], ["seed=range(3)", "add -m"]),
    (["prune", "-m", "sparsity.joint=interval(0,1)"], ["-m", "range("]),
    (["prune", "calibration.path=a=b"], ["""'calibration.path="a=b"'"""]),
    (["prune", "calibration.path=[a"], ["calibration.path=[a cannot be read"]),
    (["prune", "modell"], ["'modell'", "key=value", "model"]),
    (["prune", ""], ["''", "key=value"]),
    (["prune", "--config-dir", "nope"], ["nope", "not a folder"]),
    (["prune", "--config-dir"], ["--config-dir", "expected one argument"]),
    (["prune", "--config-name", "nope"], ["nope", "prune"]),
    (["prune", "--config-path", "x"], ["--config-path", "--config-dir"]),
    (["prune", "hydra.searchpath=[nope]"], ["nope", "not a folder"]),
    (["prune", "--bogus"], ["--bogus", "corp prune --help"]),
    (["prune", "--cfg", "jbo"], ["jbo", "job"]),
    (["prune", "--cfg", "job", "--package", "modl"], ["modl"]),
    (["prune", "-m", "--cfg", "job"], ["--multirun", "--cfg"]),
    (["prune", "modl=x", "--help"], ["did you mean model?"]),
    (["prune", "modl=x", "--cfg", "job"], ["did you mean model?"]),
    (["prune", "hydra.run.dir=/proc/nope/x"], ["/proc/nope", "hydra.run.dir"]),
    (["evaluate"], ["corp evaluate checkpoint=", "model="]),
    (["evaluate", "sparsity=uniform"], ["sparsity", "corp evaluate"]),
    (["evaluate", "model=deit_tny"], ["did you mean deit_tiny?"]),
    (["bench"], ["corp bench checkpoint="]),
    (["bench", "pruned.safetensors"], ["checkpoint=pruned.safetensors"]),
    (["bench", "checkpoint=a", "model=deit_tiny"], ["corp bench checkpoint="]),
    (["bench", "checkpoint=a", "batch_sizes=[0]"], ["batch_sizes=0", "at least 1"]),
    (["bench", "checkpoint=a", "batch_sizes=[]"], ["batch_sizes=[]", "at least one"]),
    (["bench", "checkpoint=a", "dtypes=[float64]"], ["dtypes=float64", "bfloat16"]),
    (["bench", "checkpoint=a", "runs=0"], ["runs=0"]),
    (["info"], ["corp info checkpoint="]),
    (["info", "pruned.safetensors"], ["checkpoint=pruned.safetensors"]),
    (["info", "chekpoint=x"], ["did you mean checkpoint?"]),
    (["info", "-m", "checkpoint=a,b"], ["leave out --multirun"]),
    (["-sc"], ["install=SHELL", "bash, zsh, fish"]),
    (["-sc", "install=tcsh"], ["bash, zsh, fish"]),
]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("argv", "words"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistake_ends_in_one_sentence_and_leaves_nothing(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("corp: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err
    assert not list(Path().iterdir())


FILES = [
    ("defaults: [_self_]\nseed: 1", ["defaults list"]),
    ("sede: 1", ["my.yaml", "sede", "did you mean seed?"]),
    ("seed: x", ["my.yaml", "seed", "Integer"]),
    ("- seed", ["my.yaml"]),
    ("seed: [1", ["my.yaml, line 1"]),
    ("defaults: [prune, _self_]\nsede: 1", ["my.yaml", "sede", "did you mean seed?"]),
    ("defaults: [prune, _self_]\nseed: x", ["my.yaml", "seed", "Integer"]),
    ("defaults: [prune, model/nope, _self_]", ["my.yaml", "model/nope"]),
    ("defaults: [prune, nope/nope, _self_]", ["my.yaml", "nope/nope"]),
    ("defaults: [prune, _self_]\nseed: -1", ["seed=-1"]),
]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("text", "words"), FILES, ids=[text for text, _ in FILES])
def test_mistake_in_own_config(text: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text(text)
    assert main(["prune", "--config-dir", ".", "--config-name", "my"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("corp: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert files() == ["my.yaml"]


# Failures of the work itself


def test_corp_error_removes_the_unused_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, CorpError("There are no images in\n  photos."))
    Path("outputs").mkdir()
    assert main(["prune"]) == 2
    assert capsys.readouterr() == ("", "corp: There are no images in photos.\n")
    assert list(Path().iterdir()) == [Path("outputs")]  # it was there before
    assert not list(Path("outputs").iterdir())


def test_corp_error_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, CorpError("no."), leaving="pruned.safetensors")
    assert main(["prune"]) == 2
    assert any(name.endswith("pruned.safetensors") for name in files())


def test_corp_error_keeps_a_folder_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, CorpError("no."))
    Path("here").mkdir()
    assert main(["prune", "hydra.run.dir=here"]) == 2
    assert Path("here").is_dir()


def test_bug_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["prune"]) == 1
    assert capsys.readouterr().err == (
        "corp: unexpected error: ZeroDivisionError: division by zero; "
        "set CORP_DEBUG=1 to see the traceback, and please report it\n"
    )


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, CorpError("no."))
    monkeypatch.setenv("CORP_DEBUG", "1")
    assert main(["prune"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\ncorp: no.\n")


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["prune"]) == 130
    assert capsys.readouterr().err == "corp: interrupted.\n"
    assert not list(Path().iterdir())


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m corp_cli prune --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == ""


# Completion


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("corp ", list(COMMANDS)),
        ("corp evaluate mod", ["model.", "model="]),
        ("corp evaluate sparsi", []),
        ("corp evaluate evaluation.path=ph", ["evaluation.path=photos/"]),
        ("corp bench dtypes=[b", ["dtypes=[bfloat16]"]),
        ("corp pr", ["prune"]),
        ("corp nope ", []),
        ("corp prune model=vit_d", ["model=vit_digits"]),
        ("corp prune model=deit_tiny comp", ["compensation.", "compensation="]),
        ("corp prune sparsity.j", ["sparsity.joint="]),
        ("corp prune ranker.qk=", ["ranker.qk=activation", "ranker.qk=magnitude", "ranker.qk=random"]),
        ("corp prune compensation.qk=s", ["compensation.qk=sylvester"]),
        ("corp prune --mul", ["--multirun"]),
        ("corp prune --dr", ["--dry-run"]),
        ("corp prune --dry-run dry", ["dry_run="]),
        ("corp evaluate --dr", []),
        ("corp doc", ["doctor"]),
        ("corp prune -m see", ["seed="]),
        ("corp prune calibration.path=ph", ["calibration.path=photos/"]),
        ("corp prune --config-dir ph", ["photos/"]),
        ("corp prune --config-dir photos model=n", ["model=net"]),
        ("corp info check", ["checkpoint="]),
        ("corp prune gate=", ["gate=none"]),
        ("corp export format=o", ["format=onnx"]),
        ("corp prune export=o", ["export=onnx"]),
        ("corp check ph", ["photos/"]),
        ("corp check photos/a.jpg --aga", ["--against"]),
        ("corp check photos/a.jpg --against photos/a", ["photos/a.jpg"]),
        ("corp check photos/a.jpg --against b.json gate.top1", ["gate.top1_drop="]),
        ("corp check gate=s", ["gate=strict"]),
        ("corp info checkpoint=photos/", ["checkpoint=photos/a.jpg", "checkpoint=photos/model/"]),
    ],
)
def test_candidates(line: str, expected: list[str]) -> None:
    Path("photos/model").mkdir(parents=True)
    Path("photos/a.jpg").touch()
    Path("photos/b c.jpg").touch()
    Path("photos/model/net.yaml").write_text("name: net\n")
    assert candidates(line, list(COMMANDS)) == expected


def test_hydras_own_keys_are_not_offered() -> None:
    found = candidates("corp prune ", list(COMMANDS))
    assert "model=" in found
    assert not [candidate for candidate in found if candidate.startswith("hydra")]


@pytest.mark.parametrize("line", ["corp prune --nope seed=1 mod", "corp prune [ mod", "corp prune modl=x sparsity."])
def test_what_cannot_be_completed_is_no_error(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr() == ("\n", "")


BASH = """eval "$(corp -sc install=bash)"
COMP_LINE="$1" COMP_POINT=${#1}
_corp_complete corp
printf '%s|' "${COMPREPLY[@]}"
eval "$(corp -sc uninstall=bash)"
type _corp_complete > /dev/null 2>&1 || printf gone"""
FISH = """corp -sc install=fish | source
printf '%s|' (complete -C $argv[1])
corp -sc uninstall=fish | source
functions -q _corp_complete; or printf gone"""


@pytest.fixture
def with_corp_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "corp"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m corp_cli "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("with_corp_on_path")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("corp pr", "prune |gone"),
        ("corp prune model=vit_d", "vit_digits |gone"),  # readline replaces only what follows the '='
        ("corp prune sparsity.j", "sparsity.joint=|gone"),
    ],
)
def test_bash(line: str, expected: str) -> None:
    done = subprocess.run(["bash", "-c", BASH, "bash", line], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == expected


@pytest.mark.usefixtures("with_corp_on_path")
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish() -> None:
    command = ["fish", "--no-config", "-c", FISH, "corp prune model=vit_d"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "model=vit_digits|gone"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_parse(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for action in ("install", "uninstall"):
        assert main(["-sc", f"{action}={shell}"]) == 0
        subprocess.run([shell, "-n"], input=capsys.readouterr().out, text=True, check=True)
