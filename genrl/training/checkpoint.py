"""Checkpoints that are complete or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
STATE = "training_state.pt"
DISK_PROBLEMS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES)
_STEP = re.compile(r"^step-(\d{6,})$")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what is left."""


def step_name(iteration: int) -> str:
    return f"step-{iteration:06d}"


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(iteration, folder) of every complete checkpoint, oldest first."""
    folder = run_dir / "checkpoints"
    found = [(int(m.group(1)), p) for p in (folder.iterdir() if folder.is_dir() else []) if (m := _STEP.match(p.name))]
    return sorted(found)


def find_checkpoint(run_dir: Path, which: str = "last") -> Path:
    """The folder of ``"last"``, ``"best"`` or ``"step-000010"`` (also ``"10"``).

    Raises:
        FileNotFoundError: naming what there is.
    """
    steps = list_checkpoints(run_dir)
    if which == "last" and steps:
        return steps[-1][1]
    name = step_name(int(which.removeprefix("step-"))) if which.removeprefix("step-").isdigit() else which
    path = run_dir / "checkpoints" / name
    if name != "last" and path.is_dir():
        return path
    there = [p.name for _, p in steps] + (["best"] if (run_dir / "checkpoints" / "best").is_dir() else [])
    raise FileNotFoundError(
        f"{run_dir} has no checkpoint {which!r}; it has {', '.join(there) or 'none'} (genrl train writes them)"
    )


def save_checkpoint(
    run_dir: Path,
    name: str,
    state: dict[str, Any],
    save_model: Callable[[Path], None],
    accelerator: Any,
    keep: int | None = None,
    exported: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Path:
    """Write a checkpoint on all processes and wait for all of them.

    Everything goes into a temporary folder that is renamed when it is complete, so a kill or a full disk leaves the
    previous checkpoint as it was.

    Args:
        run_dir: the run directory.
        name: folder name below ``checkpoints/``; an existing one is replaced.
        state: what the main process saves beside the model.
        save_model: called with a folder, on the main process.
        accelerator: for barriers and ranks.
        keep: number of ``step-*`` checkpoints to leave; None leaves all.
        exported: entered by every process around `save_model`, to put the weights in place that are to be written.

    Raises:
        CheckpointError: on every process, when any of them could not write.
    """
    folder = run_dir / "checkpoints"
    temporary = folder / f".writing-{name}"
    problem = ""
    try:
        if accelerator.is_main_process:
            clean_up(run_dir)
            temporary.mkdir(parents=True)
    except OSError as error:
        problem = _explain(error, temporary)
    accelerator.wait_for_everyone()
    if not problem:
        try:
            torch.save(rng_state(), temporary / f"rng-rank{accelerator.process_index}.pt")
            if accelerator.is_main_process:
                torch.save(state, temporary / STATE)  # may hold live weights by reference, so before the others
        except Exception as error:
            problem = _explain(error, temporary)
    problem = any_problem(accelerator, problem)  # before all gather weights, which none may miss
    if not problem:
        try:
            with exported():
                if accelerator.is_main_process:
                    save_model(temporary / "model")
        except Exception as error:  # every library has its own exception for a full disk
            problem = _explain(error, temporary)
    problem = any_problem(accelerator, problem)
    if not problem and accelerator.is_main_process:
        try:
            publish(temporary, folder / name)
            for _, old in list_checkpoints(run_dir)[:-keep] if keep else []:
                _remove(old)
        except OSError as error:
            problem = _explain(error, temporary)
    problem = any_problem(accelerator, problem)
    if problem:
        if accelerator.is_main_process:
            with contextlib.suppress(OSError):  # the first problem is the one to report
                clean_up(run_dir)
        steps = list_checkpoints(run_dir)
        left = f"The last complete checkpoint is {steps[-1][1]}" if steps else "There is no earlier checkpoint"
        remedy = "free the disk" if any(word in problem for word in ("disk", "large", "space")) else "mend that"
        raise CheckpointError(f"could not save {name}: {problem}. {left}; {remedy} and run the command again.")
    return folder / name


def publish(temporary: Path, final: Path) -> None:
    """Give a complete folder its final name, in place of an older one, so that a kill leaves one of the two."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    retired = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(retired, ignore_errors=True)
        os.replace(final, retired)
    os.replace(temporary, final)
    shutil.rmtree(retired, ignore_errors=True)


def _remove(path: Path) -> None:
    """Delete a folder that a kill must not leave half deleted under its own name."""
    doomed = path.with_name(f".writing-{path.name}")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean_up(run_dir: Path) -> None:
    """Remove what a kill in the middle of a save left, and put back a checkpoint that was just being replaced."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(".old-") and not (folder / path.name.removeprefix(".old-")).exists():
            os.replace(path, folder / path.name.removeprefix(".old-"))
        elif path.name.startswith((".writing-", ".old-")):
            shutil.rmtree(path, ignore_errors=True)


def load_state(folder: Path) -> dict[str, Any]:
    """The training state of a checkpoint, on the CPU.

    Raises:
        CheckpointError: when it is missing or damaged.
    """
    path = folder / STATE
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; delete {folder} to resume from an earlier checkpoint") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {error}); delete {folder} to resume from an earlier one"
        ) from error


def any_problem(accelerator: Any, problem: str) -> str:
    """The first non-empty message of any process, on every process."""
    if accelerator.num_processes == 1:
        return problem
    from accelerate.utils import gather_object

    return next((text for text in gather_object([problem]) if text), "")


def broadcast(accelerator: Any, value: T) -> T:
    """The main process's value, on every process."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def rng_state() -> dict[str, Any]:
    """Global generators, for parts of users that draw from them."""
    import numpy as np

    state: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.copy()).long(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng(folder: Path, rank: int) -> None:
    """Put the global generators of a process back; a checkpoint of fewer processes has none for the new ones."""
    import numpy as np

    path = folder / f"rng-rank{rank}.pt"
    if not path.is_file():
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _explain(error: Exception, path: Path) -> str:
    code = getattr(error, "errno", None)
    if (code is None and "PytorchStreamWriter" in str(error)) or "inline_container" in str(error):
        return f"the disk is full, or the file could not be written, at {path}"
    hint = {28: "the disk is full", 30: "the file system is read-only", 13: "no permission", 27: "file too large"}
    return f"{hint.get(code, type(error).__name__) if code else type(error).__name__} at {path}: {error}"


def disk_problem(run_dir: Path, error: OSError) -> CheckpointError:
    """What to raise when anything but a checkpoint could not be written."""
    steps = list_checkpoints(run_dir)
    left = f"the last complete checkpoint is {steps[-1][1]}" if steps else "there is no checkpoint yet"
    return CheckpointError(
        f"run directory {run_dir} cannot be written any more ({error}); {left}. Free the disk and run the command "
        "again to go on from there"
    )
