"""The wheel: what is in it, and that it works where there is no source checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from email import message_from_bytes, policy
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

import corp_cli
from corp_cli.models.bundled import BundledModel
from tests.support.documents import PAGES, anchors, code_blocks, commands_of, read
from tests.support.project import PROJECT

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[1]
LIMIT = 5 * 2**20  # bytes; the bundled model and its images are most of it
QUICK = ["calibration.num_images=64", "evaluation.num_images=32", "evaluation.throughput_batches=0", "device=cpu"]
# Runs the programs of every folder here, in order, with a small model as the bundled one, which takes a tenth of the
# time, and says where each module of corp_cli came from.
RUN_ALL = """
import json, os, runpy, sys
from dataclasses import replace
from pathlib import Path
from corp_cli.models.bundled import BUNDLED

here, changes = Path.cwd(), json.loads(sys.argv[1])
BUNDLED["vit_digits"] = replace(BUNDLED["vit_digits"], args=changes["args"], weights=Path(changes["weights"]))
for program in sorted(here.glob("*/*.py")):
    os.chdir(program.parent)
    runpy.run_path(program.name, run_name="__main__")
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "corp_cli"]
(here / "imported.json").write_text(json.dumps([files, sys.path]))
"""


def execute(*command: str | Path, cwd: Path) -> str:
    """The stdout of a command that must succeed, run without the variables that could lead it to the checkout."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_", "CORP_"))}
    offline = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=cwd, env=inherited | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from this checkout, without a network: hatchling comes with the dev extra."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--wheel", "--no-isolation", "--outdir", str(folder), str(CHECKOUT)]
    execute(sys.executable, "-m", "build", *options, cwd=folder)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of a new environment that holds the wheel, and sees the dependencies of this one."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True, symlinks=os.name != "nt")
    where = {"base": str(home), "platbase": str(home)}
    scheme = "venv" if "venv" in sysconfig.get_scheme_names() else sysconfig.get_default_scheme()
    scripts, packages = (Path(sysconfig.get_path(name, scheme, where)) for name in ("scripts", "purelib"))
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    execute(scripts / "python", "-m", "pip", "install", *options, wheel, cwd=home)
    # A .pth file adds folders to sys.path but follows no .pth file in them: an editable install stays unseen.
    dependencies = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return scripts


def test_contents(wheel: Path) -> None:
    assert wheel.name == f"corp_cli-{corp_cli.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < LIMIT
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = {f"corp_cli/{path.relative_to(CHECKOUT).as_posix()}" for path in (CHECKOUT / "configs").rglob("*.yaml")}
    modules = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "corp_cli").rglob("*.py")}
    assert len(configs) > 10
    others = {f"corp_cli/report/page/{name}" for name in ("page.html", "page.css", "page.js", "chartjs/LICENSE.md")}
    others |= {"corp_cli/py.typed", "corp_cli/bundled/vit_digits.safetensors"}
    assert configs | modules | others <= names
    tops = {name.split("/")[0] for name in names}
    info = f"corp_cli-{corp_cli.__version__}.dist-info"
    assert tops == {"corp_cli", info}  # no tests, no scripts
    assert f"{info}/licenses/LICENSE" in names


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name), policy=policy.default)


def test_links_of_what_pypi_shows_lead_into_the_tagged_repository(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(text.splitlines()) == len(readme.splitlines())
    tagged = f"{PROJECT['urls']['Source']}/blob/v{corp_cli.__version__}/"
    shown, written = (re.findall(r"\]\(([^)]+)\)", page) for page in (text, readme))
    assert len(shown) == len(written) > 20
    for link, relative in zip(shown, written, strict=True):
        if relative.startswith("https://"):
            assert link == relative
            continue
        assert link == tagged + (f"README.md{relative}" if relative.startswith("#") else relative)
        path, _, anchor = link.removeprefix(tagged).partition("#")
        assert (CHECKOUT / path).exists(), link
        assert not anchor or anchor in anchors((CHECKOUT / path).read_text("utf-8")), link


def test_the_pages_beside_the_description(metadata: Message) -> None:
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert urls.keys() == {"Documentation", "Source", "Changelog", "Issues"}
    assert urls == PROJECT["urls"]
    for url in urls.values():
        assert url.startswith(urls["Source"])
        _, _, path = url.partition("/blob/main/")
        assert (CHECKOUT / path).exists(), url
    assert metadata["Author"] == metadata["Maintainer"] == "The corp contributors"


def test_runs_away_from_the_checkout_and_reloads(installed: Path, tmp_path: Path) -> None:
    python = installed / "python"
    home = execute(python, "-c", "import corp_cli; print(corp_cli.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(installed.parent)
    path = json.loads(execute(python, "-c", "import json, sys; print(json.dumps(sys.path))", cwd=tmp_path))
    assert str(CHECKOUT) not in path

    assert execute(installed / "corp", "--version", cwd=tmp_path) == f"corp {corp_cli.__version__}\n"
    shown = execute(installed / "corp", "prune", "hydra.run.dir=run", *QUICK, cwd=tmp_path)
    assert "Wrote pruned.safetensors, report.json, report.html and plan.yaml" in shown
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]

    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["calibration"]["images"] == 64
    assert report["evaluation"]["images"] == 32
    count = "from corp_cli import load_pruned; m = load_pruned('run/pruned.safetensors')"
    counted = execute(python, "-c", f"{count}; print(sum(p.numel() for p in m.parameters()))", cwd=tmp_path)
    assert int(counted) == report["size"]["pruned"]["parameters"]
    assert f"{int(counted):,}" in execute(installed / "corp", "info", "checkpoint=run/pruned.safetensors", cwd=tmp_path)


def program(argv: list[str]) -> str:
    """A command line as a program: each in a process of its own would import torch anew."""
    return f"from corp_cli.cli.main import main\nassert main({argv!r}) == 0\n"


def cell(source: str) -> str:
    """A cell of a notebook as a program."""
    return program(shlex.split(source)[1:]) if source.startswith("!corp ") else source


def examples() -> dict[str, list[str]]:
    """Page → its examples in order: all marked ones, with the first step, whose file one reads, and the notebook."""
    found = {page: [block.body for block in code_blocks(read(page)) if block.marked] for page in PAGES}
    found["docs/first-steps.md"].insert(0, program(commands_of(read("docs/first-steps.md"))[0]))
    cells = json.loads(read("docs/first-steps.ipynb"))["cells"]
    found["docs/first-steps.ipynb"] = ["\n".join(cell("".join(c["source"])) for c in cells if c["cell_type"] == "code")]
    return {page: programs for page, programs in found.items() if programs}


def test_the_examples_of_the_pages_run_away_from_the_checkout(
    installed: Path, tiny_model: BundledModel, tmp_path: Path
) -> None:
    """`corp_cli` comes from the wheel alone."""
    shown = examples()
    pages = {
        "README.md",
        *(f"docs/{name}" for name in ("first-steps.md", "first-steps.ipynb", "python.md", "usage.md")),
    }
    assert shown.keys() == pages
    for page, programs in shown.items():
        folder = tmp_path / Path(page).name
        folder.mkdir()
        for i, source in enumerate(programs):
            (folder / f"{i:02}.py").write_text(source, "utf-8")
    tiny = json.dumps({"args": tiny_model.args, "weights": str(tiny_model.weights)})
    execute(installed / "python", "-c", RUN_ALL, tiny, cwd=tmp_path)
    files, path = json.loads((tmp_path / "imported.json").read_text())
    assert len(files) > 50
    assert all(Path(file).is_relative_to(installed.parent) for file in files)
    # The site-packages of the tests, which lend PyTorch and the like, do not hold its code.
    holding = [entry for entry in path if (tmp_path / entry / "corp_cli/__init__.py").is_file()]
    assert all(Path(entry).is_relative_to(installed.parent) for entry in holding), holding
