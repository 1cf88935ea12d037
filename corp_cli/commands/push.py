"""`corp push`: a pruned checkpoint as a repository of the Hugging Face hub, or, with --dry-run, as a folder of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corp_cli.config.push import PushConfig
from corp_cli.errors import CorpError
from corp_cli.export.timm_entry import create, write_config
from corp_cli.files.checkpoint import building, counts_of
from corp_cli.files.fetch import WEIGHTS
from corp_cli.files.manifest import read_manifest
from corp_cli.files.output import CHECKPOINT, REPORT, appearing, cannot_write, require_room, write_whole
from corp_cli.files.shards import INDEX, checkpoint_files, copy_checkpoint
from corp_cli.models.origin import Origin, origin_of
from corp_cli.models.spec import Counts, Manifest
from corp_cli.report.card import Facts, model_card, read_report
from corp_cli.report.gate_input import at
from corp_cli.runtime import console, hub
from corp_cli.version import __version__

CARD, CONFIG = "README.md", "config.json"
SHARDS = ("model.safetensors.index.json", f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors")
FILES = (CARD, CONFIG, WEIGHTS, *SHARDS, REPORT)  # all that a repository gets, so that no other file is ever sent


def run(cfg: PushConfig, output_dir: Path) -> None:
    """`corp push`: write the repository, upload it unless `cfg.dry_run`, and say where it is.

    Raises CorpError, before anything is uploaded, for a file that is no pruned checkpoint, a report of another one, a
    folder that holds files of others, and a hub out of reach.
    """
    console.collect_warnings()  # so that those of an earlier run in this process do not keep ours back
    repo, checkpoint = str(cfg.repo), Path(str(cfg.checkpoint))  # PushConfig asks for both
    manifest = read_manifest(checkpoint)
    with building(str(checkpoint), manifest):
        counts = manifest.counts or counts_of(manifest)  # which files of older versions do not hold
    if not cfg.dry_run:
        require_hub(repo)
    facts = gather(cfg, checkpoint, manifest, counts)
    card = model_card(facts, manifest, counts)
    url = ""
    size = sum(file.stat().st_size for file in checkpoint_files(checkpoint))
    with repository(cfg.folder, size) as folder:
        names = ", ".join(write(folder, checkpoint, manifest, card, facts.report is not None))
        if not cfg.dry_run:
            url = upload(folder, repo, cfg.private)
    if facts.license is None:
        console.warn("the licence of the dense weights is not known, and the card says so; name it with license=…")
    out = console.out()
    if cfg.folder:
        out.print(f"Wrote {names} to {cfg.folder}{'; nothing was uploaded' if cfg.dry_run else ''}.", markup=False)
    if not cfg.dry_run:
        out.print(f"Uploaded {names} to {url}.", markup=False)


def gather(cfg: PushConfig, checkpoint: Path, manifest: Manifest, counts: Counts) -> Facts:
    """What the card says besides the manifest. Warns where there is no report of the checkpoint."""
    path, report, origin = checkpoint.with_name(REPORT), None, Origin()
    if (
        checkpoint.name.removesuffix(INDEX) != CHECKPOINT or not path.is_file()
    ):  # a file of another name may have been trained since
        console.warn(f"there is no {REPORT} of {checkpoint}, so that the card holds no accuracy and no fidelity.")
    else:
        report = read_report(path, manifest, counts)
        own = at(report, "config.model.checkpoint") is not None or at(report, "config.model.pretrained") is False
        origin = origin_of(str(at(report, "model.name")), own)
    base = cfg.base_model or origin.base_model
    license, by = (cfg.license, "") if cfg.license else (origin.license, origin.license_by)
    return Facts(str(cfg.repo), report, base, license, by)


def write(folder: Path, checkpoint: Path, manifest: Manifest, card: str, report: bool) -> list[str]:
    """Write the files of the repository into the empty `folder`, and build the model from them → their names."""
    copy_checkpoint(checkpoint, folder / WEIGHTS)
    write_config(manifest.model, folder)
    create(folder)  # as whoever downloads it will
    write_whole(folder / CARD, lambda file: file.write(card))
    if report:
        shutil.copyfile(checkpoint.with_name(REPORT), folder / REPORT)
    return [path.name for path in ours(folder)]


@contextmanager
def repository(place: str | None, size: int) -> Iterator[Path]:
    """A new folder to write to, which becomes the folder `place` after the body, or goes where that fails.

    Raises CorpError where `place` is a file, or holds what an earlier corp push did not write, or has no room.
    """
    if place is None:
        with tempfile.TemporaryDirectory(prefix="corp-push-") as scratch:
            require_room(Path(scratch), size, "TMPDIR")
            yield Path(scratch)
        return
    folder = Path(place).absolute()
    require_own(folder)
    require_room(folder, size, "folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with appearing(folder) as fresh:
            fresh.mkdir()
            yield fresh
            for path in ours(folder):
                path.unlink()
    except OSError as error:
        raise CorpError(cannot_write(folder, error, "folder")) from error


def ours(folder: Path) -> list[Path]:
    """The files in `folder` of the names that a repository has."""
    return [path for pattern in FILES for path in sorted(folder.glob(pattern))]


def require_own(folder: Path) -> None:
    """Raise CorpError unless `folder` is new, empty, or as an earlier corp push left it."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or folder.is_symlink():
        raise CorpError(f"{folder} is not a folder; choose another with folder=FOLDER.")
    held = sorted(path.name for path in folder.iterdir())
    others = sorted(set(held) - {path.name for path in ours(folder)})
    if not others and held:
        try:
            read_manifest(folder / WEIGHTS)
        except CorpError:
            others = held
    if others:
        raise CorpError(
            f"{folder} holds {others[0]}, which corp push did not write; choose a new folder with folder=FOLDER."
        )


def require_hub(repo: str) -> None:
    """Raise CorpError where nothing can be uploaded now."""
    if silence := hub.silent():
        raise CorpError(
            f"{repo} cannot be uploaded ({silence}); --dry-run folder=FOLDER writes it to a folder instead."
        )


def upload(folder: Path, repo: str, private: bool) -> str:
    """Make the repository where there is none, and put the files of `folder` into it in one commit → its address."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="corp", library_version=__version__)
    message = f"Pruned by corp {__version__}"
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            allow_patterns=list(FILES),
            delete_patterns=[REPORT, WEIGHTS, *SHARDS],  # of an earlier push, where this one has none
        )
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = hub.failure(error, None)
        if status in (401, 403) or "Token" in type(error).__name__:
            why = f"the hub does not let you write there: log in with `hf auth login` as {repo.partition('/')[0]}"
        raise CorpError(f"{repo} cannot be uploaded ({why}); then run the same command again.") from error
    return str(url)
