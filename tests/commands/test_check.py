"""`corp check` and `corp prune gate.*` as a user types them: table, exit code, JUnit XML, Markdown, and the guide."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from corp_cli.cli.compose import config_dir, register
from corp_cli.cli.main import main
from corp_cli.config.gate import CheckConfig, GateConfig, LimitsConfig
from tests.support.documents import check_understood, code_blocks, commands, read
from tests.support.golden import DEFAULT, EVALUATION, REPORT, changed, save
from tests.support.typed import UNTIMED, one_sentence

pytestmark = pytest.mark.usefixtures("tiny_digits")

AGAINST = ["check", "report.json", "--against", "baseline.json"]
WORSE = (
    "corp: report.json is worse than baseline.json: top-1 -3.00 points, allowed -0.50 points (gate.top1_drop); "
    "if that is meant, make a new baseline or allow more.\n"
)
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORP_DEBUG", raising=False)
    save("baseline.json", REPORT)
    save("report.json", REPORT)


def lower(points: float) -> None:
    """Let report.json have lost top-1."""
    save("report.json", changed(REPORT, evaluation__pruned__top1=97.75 - points))


# The exit code, and what is said


def test_equal_reports_pass(capsys: Captured) -> None:
    assert main(AGAINST) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert re.search(r"top-1 +│ +97\.75% │ +97\.75% │ \+0\.00 points │ -0\.50 points │ ok", captured.out)
    assert "None of 6 worse than allowed." in captured.out
    assert sorted(path.name for path in Path().iterdir()) == ["baseline.json", "report.json"]


def test_three_points_less_top1_is_worse(capsys: Captured) -> None:
    lower(3)
    assert main(AGAINST) == 3
    captured = capsys.readouterr()
    assert captured.err == WORSE
    assert re.search(r"top-1 +│ +97\.75% │ +94\.75% │ -3\.00 points │ -0\.50 points │ worse", captured.out)
    assert main([*AGAINST, "gate.top1_drop=3"]) == 0
    assert main([*AGAINST, "gate.top1_drop=null"]) == 0


def test_another_schema_version_cannot_be_compared(capsys: Captured) -> None:
    save("report.json", changed(REPORT, schema_version=2))
    assert main([*AGAINST, "junit=junit.xml"]) == 2
    assert capsys.readouterr() == (
        "",
        "corp: report.json has schema_version 2 and this corp compares 1; write it again with this corp, or use the "
        "corp that wrote it.\n",
    )
    assert not Path("junit.xml").exists()


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["check", "--against=baseline.json", "report.json"], 3),
        (["check", "report=report.json", "against=baseline.json"], 3),
        (["check", "gate.top1_drop=5", "--against", "baseline.json", "./report.json"], 0),
        ([*AGAINST, "gate=strict", "gate.top1_drop=5"], 0),
        ([*AGAINST, "gate=none", "gate.max_top1_drop=2"], 3),
        (["check", "report.json", "gate.max_top1_drop=4"], 0),
        (["check", "report.json", "gate.max_top1_drop=3"], 3),
    ],
)
def test_ways_to_say_it(argv: list[str], code: int) -> None:
    lower(3)
    assert main(argv) == code


def test_files_of_any_name() -> None:
    for name in ("my report (1).json", 'a,b".json', "c[d].json", "back\\"):
        assert main(["check", save(name, REPORT), "--against", name]) == 0


def test_limits_alone_show_no_baseline(capsys: Captured) -> None:
    assert main(["check", "report.json", "gate.max_top1_drop=0.25", "gate.min_macs_removed=0.4"]) == 3
    captured = capsys.readouterr()
    assert "baseline" not in captured.out
    assert re.search(r"MACs removed +│ +40\.0% │ +at least 40\.0% │ ok", captured.out)
    assert captured.err == (
        "corp: report.json breaks a limit: top-1 below dense 0.50 points, allowed at most 0.25 points "
        "(gate.max_top1_drop); if that is meant, allow more.\n"
    )


def test_evaluations(capsys: Captured) -> None:
    save("report.json", EVALUATION)
    save("baseline.json", EVALUATION)
    assert main(AGAINST) == 0
    assert main([*AGAINST, "gate=strict"]) == 0
    assert "not measured" in capsys.readouterr().out


MISTAKES = [
    (["check"], ["corp check report.json --against baseline.json"]),
    (["check", "report.json"], ["nothing to check", "--against", "gate.max_top1_drop=2"]),
    (["check", "report.json", "baseline.json"], ["one report at a time", "--against baseline.json"]),
    (["check", "report.json", "--against"], ["--against needs a file"]),
    (["check", "report.json", "--against", "--cfg"], ["--against needs a file"]),
    ([*AGAINST, "gate=none"], ["all of gate.* is null"]),
    ([*AGAINST, "gate=lax"], ["gate=lax", "default, none or strict", "gate.top1_drop"]),
    ([*AGAINST, "gate.top1=1"], ["no key gate.top1", "did you mean gate.top1_drop?"]),
    ([*AGAINST, "gate.kl=-1"], ["gate.kl=-1"]),
    ([*AGAINST, "-m"], ["leave out --multirun"]),
    (["check", "nope.json", "--against", "baseline.json"], ["report=nope.json cannot be read"]),
    (["check", "report.json", "--against", "nope.json"], ["against=nope.json cannot be read"]),
    (["check", ".", "--against", "baseline.json"], ["report=. cannot be read (Is a directory)"]),
    (["check", "cut.json", "--against", "baseline.json"], ["report=cut.json is not whole JSON"]),
    (["check", "binary", "--against", "baseline.json"], ["report=binary is not whole JSON"]),
    (["check", "list.json", "--against", "baseline.json"], ["list.json is not a report", "report.json of corp prune"]),
    ([*AGAINST, "junit=report.json/x.xml"], ["junit=report.json/x.xml cannot be written"]),
    ([*AGAINST, "markdown=."], ["markdown=. cannot be written"]),
    (["check", "report.json", "gate=none", "gate.min_speedup=nan"], ["gate.min_speedup=nan"]),
    (["check", "slow.json", "gate.min_speedup=1"], ["gate.min_speedup cannot be checked"]),
]


@pytest.mark.parametrize(("argv", "words"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistake_ends_in_one_sentence(argv: list[str], words: list[str], capsys: Captured) -> None:
    Path("cut.json").write_text('{"schema_version": 1')
    Path("binary").write_bytes(b"\xff\xfe\x00")
    save("list.json", [1])
    save("slow.json", changed(REPORT, throughput=None))
    before = sorted(Path().rglob("*"))
    assert main(argv) == 2
    one_sentence(capsys, words)
    assert sorted(Path().rglob("*")) == before


def test_nothing_that_could_be_compared_is_no_pass(capsys: Captured) -> None:
    other = {**REPORT["environment"], "device": "mps"}  # type: ignore[dict-item]
    save("report.json", changed(REPORT, environment=other))
    assert main([*AGAINST, "gate=none", "gate.throughput=0.1"]) == 2
    assert "Nothing could be compared (images/s: not compared: other machine)" in capsys.readouterr().err


def test_no_torch_is_imported() -> None:
    code = "import sys; from corp_cli.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *AGAINST], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# Files for CI

JUNIT = """\
<?xml version='1.0' encoding='utf-8'?>
<testsuites tests="4" failures="1" errors="0" skipped="1">
  <testsuite name="corp check: report.json against baseline.json" tests="4" failures="1" errors="0" skipped="1">
    <testcase classname="corp.check" name="gate.top1_drop">
      <failure message="top-1 -3.00 points, allowed -0.50 points" type="worse">baseline 97.75%, report 94.75%</failure>
    </testcase>
    <testcase classname="corp.check" name="gate.macs" />
    <testcase classname="corp.check" name="gate.throughput">
      <skipped message="not in the baseline" />
    </testcase>
    <testcase classname="corp.check" name="gate.max_kl" />
  </testsuite>
</testsuites>
"""
MARKDOWN = """\
### corp check: 1 of 3 worse than allowed, 1 not compared

`report.json against baseline.json`

| metric | baseline | report | change | allowed | result |
| --- | ---: | ---: | ---: | ---: | --- |
| **top-1** | **97.75%** | **94.75%** | **-3.00 points** | **-0.50 points** | **worse** |
| MACs | 6,000,000 | 6,000,000 | +0.00% | +1.00% | ok |
| images/s | - | 3,500 |  | -10.0% | not in the baseline |
| KL to dense |  | 0.0020 nats |  | at most 0.5000 nats | ok |
"""


def test_junit_and_markdown_word_for_word() -> None:
    lower(3)
    save("baseline.json", changed(REPORT, throughput=None))
    gate = ["gate=none", "gate.top1_drop=0.5", "gate.macs=0.01", "gate.throughput=0.1", "gate.max_kl=0.5"]
    assert main([*AGAINST, *gate, "junit=ci/junit.xml", "markdown=ci/summary.md"]) == 3
    assert Path("ci/junit.xml").read_text("utf-8") == JUNIT
    assert Path("ci/summary.md").read_text("utf-8") == MARKDOWN
    assert sorted(path.name for path in Path("ci").iterdir()) == ["junit.xml", "summary.md"]


def test_junit_of_a_pass_holds_every_tolerance() -> None:
    assert main([*AGAINST, "gate=strict", "junit=junit.xml"]) == 0
    suite = ElementTree.parse("junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("8", "0")
    tolerances = [item.name for item in fields(GateConfig)][len(fields(LimitsConfig)) :]
    assert [case.get("name") for case in suite.iter("testcase")] == [f"gate.{key}" for key in tolerances]


# Configs


def test_defaults_of_the_command() -> None:
    register()
    with initialize_config_dir(config_dir=str(config_dir().resolve()), version_base="1.3"):
        composed = OmegaConf.to_object(compose("check", ["report=r", "against=b"]))
    assert composed == CheckConfig(report="r", against="b", gate=DEFAULT)


@pytest.mark.parametrize("choice", ["default", "strict", "none"])
def test_every_key_is_explained_in_every_choice(choice: str) -> None:
    text = (config_dir() / "gate" / f"{choice}.yaml").read_text("utf-8")
    schema = LimitsConfig if choice == "none" else GateConfig
    assert re.findall(r"^(\w+):.+  # (?:percent|fraction|nats|ratio)", text, re.MULTILINE) == [
        item.name for item in fields(schema)
    ]


# corp prune


def test_prune_that_breaks_a_limit_keeps_its_files(capsys: Captured) -> None:
    broken = ["gate.max_kl=0", "gate.min_macs_removed=0.3"]
    assert main(["prune", *UNTIMED, *broken, "sparsity.joint=0.5", "hydra.run.dir=run"]) == 3
    captured = capsys.readouterr()
    assert "Wrote pruned.safetensors, report.json, report.html and plan.yaml" in captured.out
    (said,) = (line for line in captured.err.splitlines() if "images are seen" not in line)
    pattern = r"corp: The result breaks a limit: KL to dense \d\.\d+ nats, allowed at most .* nats \(gate\.max_kl\); "
    assert re.fullmatch(pattern + r"its files are in .*run\.", said)
    assert {"pruned.safetensors", "report.json", "plan.yaml"} <= {path.name for path in Path("run").iterdir()}
    assert json.loads(Path("run/report.json").read_text())["config"]["gate"]["max_kl"] == 0.0
    assert main(["check", "run/report.json", *broken]) == 3
    assert main(["check", "run/report.json", "--against", "run/report.json", "gate.kl=0", "gate.top1_drop=0"]) == 0


def test_prune_within_its_limits(capsys: Captured) -> None:
    limits = ["gate.max_top1_drop=60", "gate.min_params_removed=0.3"]
    assert main(["prune", *UNTIMED, *limits, "sparsity.joint=0.5", "hydra.run.dir=run"]) == 0
    evaluate = ["evaluate", "checkpoint=run/pruned.safetensors", "model=vit_digits", "evaluation.num_images=64"]
    assert main([*evaluate, "device=cpu", "evaluation.num_workers=0", "hydra.run.dir=run"]) == 0
    assert main(["check", "run/evaluation.json", "--against", "run/evaluation.json", *limits]) == 0
    assert "parameters removed" in capsys.readouterr().out


def test_all_jobs_of_a_multirun_run(capsys: Captured) -> None:
    jobs = ["gate.min_macs_removed=0.3", "sparsity.joint=0.1,0.5", "hydra.sweep.dir=sweep"]
    assert main(["prune", "-m", *UNTIMED, *jobs]) == 3
    assert "corp: job 0 (" in capsys.readouterr().err
    worse, good = Path("sweep/summary.csv").read_text().splitlines()[1:]
    assert ",worse," in worse
    assert "gate.min_macs_removed" in worse
    assert ",ok," in good
    assert Path("sweep/0/pruned.safetensors").is_file()


def test_an_error_wins_over_a_result_that_is_worse() -> None:
    jobs = ["gate.min_macs_removed=0.9", "calibration.path=null,nowhere", "hydra.sweep.dir=sweep"]
    assert main(["prune", "-m", *UNTIMED, *jobs]) == 2
    assert [line.split(",")[2] for line in Path("sweep/summary.csv").read_text().splitlines()[1:2]]


def test_a_limit_that_needs_labels_is_refused_before_the_work(capsys: Captured) -> None:
    from PIL import Image

    Path("photos").mkdir()
    Image.new("L", (8, 8)).save("photos/a.png")
    assert main(["prune", *UNTIMED, "evaluation.path=photos", "gate.max_top1_drop=2"]) == 2
    assert "gate.max_top1_drop needs labels" in capsys.readouterr().err
    assert not Path("outputs").exists()


# The guide

SAID = re.findall(r"^```bash\n([^`]*?)^```\n\n```text\n(corp: [^`]*?)^```$", read("docs/ci.md"), re.MULTILINE)


@pytest.mark.parametrize(("bash", "message"), SAID, ids=[bash.strip() for bash, _ in SAID])
def test_the_guide_shows_what_corp_says(bash: str, message: str, capsys: Captured) -> None:
    save("worse.json", changed(REPORT, evaluation__pruned__top1=94.75))
    save("other-version.json", changed(REPORT, schema_version=2))
    save("other-images.json", changed(REPORT, evaluation__list_sha256="c" * 64))
    unlabelled = {"evaluation__pruned__top1": None}
    save("unlabelled.json", changed(REPORT, **unlabelled))
    (argv,) = commands(bash)
    assert main(argv) == (3 if "worse than" in message else 2)
    pattern = ".*".join(re.escape(part) for part in " ".join(message.split()).split("…"))
    assert re.fullmatch(pattern, capsys.readouterr().err.strip())


def test_table_of_tolerances_in_the_guide() -> None:
    register()
    rows = re.findall(r"^\| `gate\.(\w+)` \| (\S+) \| (\S+) \|.*\|.*\|$", read("docs/ci.md"), re.MULTILINE)
    assert [key for key, *_ in rows] == [f.name for f in fields(GateConfig)][len(fields(LimitsConfig)) :]
    for column, choice in ((1, "default"), (2, "strict")):
        values = yaml.safe_load((config_dir() / "gate" / f"{choice}.yaml").read_text("utf-8"))
        for row in rows:
            assert yaml.safe_load(row[column]) == values[row[0]], row


def test_workflow_runs_what_corp_understands(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    blocks = [block.body for block in code_blocks(read("docs/ci.md")) if block.body.startswith("# .github/workflows/")]
    steps = [step for block in blocks for step in yaml.safe_load(block)["jobs"]["prune"]["steps"]]
    typed = [argv for step in steps for argv in commands(step.get("run", ""))]
    assert {argv[0] for argv in typed} == {"prune", "check"}
    for argv in typed:
        check_understood(argv, monkeypatch, capsys)
