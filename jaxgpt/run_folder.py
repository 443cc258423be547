"""The folder of a run: claimed, checked for what must not be lost, made self-contained."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from jaxgpt import config
from jaxgpt.checkpoint import lock
from jaxgpt.config import Config
from jaxgpt.durable import storage_errors, write_atomic
from jaxgpt.errors import ConfigError, NothingRestorable, StorageError
from jaxgpt.tokenization.tokenizer import Tokenizer
from jaxgpt.training.rows import read_rows

KEPT = "hf"  # folder in a run for the files of an import, which an export gives back
# What a run leaves in its folder besides the data store, which may lie there too.
RUN_FILES = (
    "ckpt",
    "metrics.jsonl",
    "tensorboard",
    "config.toml",
    "tokenizer.model",
    "samples.jsonl",
    KEPT,
)


def claim_folder(run_dir: Path, cfg: Config, say: Callable[[str], None]) -> None:
    """Make the run folder; with run.overwrite, set an earlier run in it aside.

    Raises ConfigError where it cannot be, or where that run is still going on.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        old = [run_dir / name for name in RUN_FILES if (run_dir / name).exists()]
        if cfg.run.overwrite and old and jax.process_index() == 0:
            with contextlib.ExitStack() as stack:
                if (run_dir / "ckpt").is_dir():  # of a job that still writes there would be two
                    stack.enter_context(lock.claim(run_dir / "ckpt"))
                number = 1
                while (aside := run_dir / f"previous-{number}").exists():
                    number += 1
                aside.mkdir()
                for path in old:
                    path.rename(aside / path.name)
            say(f"{run_dir}: the earlier run was moved to {aside}")
    except OSError as error:
        raise ConfigError(
            f"run.dir = {run_dir}: {error.strerror} ({error.filename}); choose a folder that can "
            "be written"
        ) from None


def check_never_saved(run_dir: Path, every: int, say: Callable[[str], None]) -> None:
    """Raise NothingRestorable in a folder whose run got so far that checkpoints must be lost."""
    if jax.process_index() != 0:  # another host may still see what was moved aside
        return
    reached = max((row["step"] for row in read_rows(run_dir / "metrics.jsonl")), default=0)
    if every and reached > every:
        raise NothingRestorable(
            f"{run_dir}: this run reached step {reached} and saved every {every} steps, but ckpt/ "
            "holds nothing; put it back, set run.overwrite=true, or use another run.dir"
        )
    if reached:
        say(f"{run_dir}: was interrupted before its first checkpoint; starting at step 0")


def copy_kept(source: Path, run_dir: Path) -> None:
    """Copy what an import left for an export to a run that starts from those weights."""
    if not (source / KEPT).is_dir() or (run_dir / KEPT).exists() or jax.process_index() != 0:
        return
    with storage_errors(run_dir / KEPT):
        shutil.copytree(source / KEPT, run_dir / KEPT)


def write_run_files(run_dir: Path, cfg: Config, tok: Tokenizer) -> None:
    """Write what makes the folder self-contained: configuration with origins, tokenizer."""
    if jax.process_index() != 0:
        return
    try:
        write_atomic(run_dir / "config.toml", config.to_toml(cfg).encode())
        write_atomic(run_dir / "tokenizer.model", tok.raw)
    except OSError as error:
        raise StorageError(f"{run_dir}: {error.strerror} ({error.filename})") from None
