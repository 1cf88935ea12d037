"""action.yml: its scripts do, on the bundled model, what its inputs say, and set its outputs and the summary."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import corp_cli
from tests.support.documents import ROOT, code_blocks, read
from tests.support.project import PROJECT, require_no_complaint

ACTION: dict[str, Any] = yaml.safe_load(read("action.yml"))
STEPS: dict[str, Any] = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}
QUICK = "calibration.num_images=64\nevaluation.num_images=50 evaluation.throughput_batches=0 recipe=paper"


@dataclass(frozen=True)
class Job:
    """What the scripts of the action left behind."""

    code: int
    outputs: dict[str, str]
    summary: str
    log: str


def run_action(place: Path, names: tuple[str, ...] = ("Prune", "Check"), **inputs: str) -> Job:
    """The steps `names` in `place`, one after the other until one fails, as a runner of GitHub does."""
    values = {key: spec["default"] for key, spec in ACTION["inputs"].items()} | inputs
    known = {f"inputs.{key}": value for key, value in values.items()} | {"github.action_path": str(ROOT)}
    tools, files = place / "tools", {key: place / key for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    tools.mkdir(exist_ok=True)
    for tool, module in {"python": "", "corp": "-m corp_cli"}.items():
        (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tools / tool).chmod(0o755)
    environment = os.environ | {key: str(path) for key, path in files.items()}
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for path in files.values():
        path.write_text("")
    code, log = 0, ""
    for step in (STEPS[name] for name in names):
        own = {key: re.sub(r"\$\{\{ (\S+) \}\}", lambda m: known[m[1]], value) for key, value in step["env"].items()}
        script = place / "script.sh"
        script.write_text(step["run"])
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        done = subprocess.run(command, cwd=place, env=environment | own, capture_output=True, text=True)
        code, log = done.returncode, log + done.stdout + done.stderr
        if code:
            break
    written = [line.partition("=") for line in files["GITHUB_OUTPUT"].read_text().splitlines()]
    outputs = {key: value for key, _, value in written}
    return Job(code, outputs, files["GITHUB_STEP_SUMMARY"].read_text(), log)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the jobs of all tests."""
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def pruned(place: Path) -> Job:
    """A run into `run` of `place`, with neither a gate nor a baseline: there is nothing to check."""
    return run_action(place, args=f"{QUICK} 'seed=7'", folder="run")


def test_a_run_gives_every_output_and_a_summary(place: Path, pruned: Job) -> None:
    assert pruned.code == 0, pruned.log
    assert pruned.outputs.keys() == ACTION["outputs"].keys()
    report = json.loads((place / pruned.outputs["report"]).read_text())
    assert report["seed"] == 7
    assert (report["calibration"]["images"], report["evaluation"]["images"]) == (64, 50)
    assert float(pruned.outputs["macs-removed"]) == report["size"]["removed_percent"]["macs"]
    assert float(pruned.outputs["params-removed"]) == report["size"]["removed_percent"]["parameters"]
    assert float(pruned.outputs["top1"]) == report["evaluation"]["pruned"]["top1"]
    assert float(pruned.outputs["agreement"]) == report["evaluation"]["pruned"]["agreement"]
    assert (place / pruned.outputs["checkpoint"]).is_file()
    assert pruned.summary.startswith("### corp prune\n```text\n")
    assert pruned.summary.endswith("```\n")
    assert "│ parameters  │ 674.41 k │" in pruned.summary


def test_no_arguments_and_those_with_meaning_for_a_shell(tmp_path: Path) -> None:
    """Words arrive as they are: nothing is expanded or executed, and quotes hold them together."""
    (tmp_path / "a.txt").touch()
    script = STEPS["Prune"]["run"].replace("corp prune", "printf '%s\\n'").partition("python - >>")[0]
    assert "printf" in script
    words = {"": [], "$(touch made) *.txt 'a b'\n$HOME;touch": ["$(touch", "made)", "*.txt", "a b", "$HOME;touch"]}
    for args, expected in words.items():
        environment = os.environ | {"ARGS": args, "FOLDER": "f", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", "-eo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.stdout.splitlines() == [*expected, "hydra.run.dir=f"], done.stderr
    assert not (tmp_path / "made").exists()


def test_a_run_that_corp_refuses_ends_with_its_code_and_no_outputs(tmp_path: Path) -> None:
    job = run_action(tmp_path, args="sparsity.joint=2")
    assert (job.code, job.outputs) == (2, {})
    assert "corp: sparsity.joint=2" in job.log
    assert run_action(tmp_path, args="'never closed").code == 1


@pytest.mark.slow
def test_a_limit_of_the_run_itself_fails_it_with_outputs(tmp_path: Path) -> None:
    job = run_action(tmp_path, args=f"{QUICK} gate.min_macs_removed=0.9")
    assert job.code == 3, job.log
    assert job.outputs.keys() == ACTION["outputs"].keys()
    assert "674.41 k" in job.summary


@pytest.mark.usefixtures("pruned")
def test_a_gate_file_anywhere_decides(place: Path) -> None:
    gate = place / "anywhere.yaml"
    gate.write_text("defaults: [default]\nmin_macs_removed: 0.3\n")
    job = run_action(place, ("Check",), folder="run", gate=gate.name)
    assert job.code == 0, job.log
    assert "MACs" in job.summary
    gate.write_text("defaults: [default]\nmin_macs_removed: 0.9\n")
    job = run_action(place, ("Check",), folder="run", gate=gate.name)
    assert job.code == 3, job.log
    assert "worse" in job.summary
    assert run_action(place, ("Check",), folder="run", gate="missing.yaml").code == 2


@pytest.mark.usefixtures("pruned")
def test_a_baseline_is_compared(place: Path) -> None:
    better = json.loads((place / "run/report.json").read_text())
    job = run_action(place, ("Check",), folder="run", baseline="run/report.json")
    assert job.code == 0, job.log
    better["evaluation"]["pruned"]["kl"] -= 1.0
    (place / "better.json").write_text(json.dumps(better))
    job = run_action(place, ("Check",), folder="run", baseline="better.json")
    assert job.code == 3, job.log
    assert "KL" in job.summary


def test_what_is_installed(tmp_path: Path) -> None:
    """torch by the requirement of the package, then the package itself."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$*\" >> installed\n")
    python.chmod(0o755)
    step = STEPS["Install corp"]
    environment = os.environ | {"SOURCE": str(ROOT), "TORCH_INDEX": "INDEX", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
    first, second = (tmp_path / "installed").read_text().splitlines()
    (torch,) = [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("torch>")]
    assert first.startswith("-m pip install ")
    assert first.endswith(f" --index-url INDEX {torch} torchvision")
    assert second.startswith("-m pip install ")
    assert second.endswith(f" {ROOT}")


def test_expressions_stand_outside_of_scripts() -> None:
    """What a user writes reaches a script as a variable, so that it is never read as code."""
    assert not any("${{" in step["run"] for step in STEPS.values())
    named = set(re.findall(r"inputs\.([\w-]+)", read("action.yml")))
    assert named == ACTION["inputs"].keys()


def test_the_schema_of_github_allows_it() -> None:
    require_no_complaint("check-jsonschema", "--builtin-schema", "vendor.github-actions", ROOT / "action.yml")


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    for i, step in enumerate(STEPS.values()):
        (tmp_path / f"{i}.sh").write_text(step["run"])
    require_no_complaint("shellcheck", "--shell", "bash", *sorted(tmp_path.glob("*.sh")))


def test_the_page_uses_it_as_it_is(tmp_path: Path) -> None:
    """The example of docs/ci.md is a workflow that GitHub takes, and gives the action inputs that it has."""
    (text,) = [block.body for block in code_blocks(read("docs/ci.md")) if "uses: OWNER/corp@" in block.body]
    (tmp_path / "workflow.yml").write_text(text)
    require_no_complaint("check-jsonschema", "--builtin-schema", "vendor.github-workflows", tmp_path / "workflow.yml")
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    (step,) = [step for step in steps if step.get("uses", "").startswith("OWNER/corp@")]
    assert step["with"].keys() <= ACTION["inputs"].keys()
    used = set(re.findall(r"steps\.corp\.outputs\.([\w-]+)", text))
    assert used
    assert used <= ACTION["outputs"].keys()
    repository, _, tag = step["uses"].partition("@")
    assert (f"https://github.com/{repository}", tag) == (PROJECT["urls"]["Source"], f"v{corp_cli.__version__}")
