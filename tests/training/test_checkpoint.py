"""Checkpoints are complete or absent, whatever happens while one is written."""

import os
import random
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genrl.training.checkpoint import (
    CheckpointError,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    load_state,
    restore_rng,
    save_checkpoint,
    step_name,
)

ALONE = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, wait_for_everyone=lambda: None)


def save(run_dir, iteration, keep=None, name=None, size=10):
    state = {"iteration": iteration, "values": torch.full((size,), float(iteration))}

    def save_model(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes([iteration]) * 1000)

    return save_checkpoint(run_dir, name or step_name(iteration), state, save_model, ALONE, keep)


def is_whole(folder, iteration=None):
    state = load_state(folder)
    iteration = state["iteration"] if iteration is None else iteration
    return (
        state["iteration"] == iteration
        and bool((state["values"] == iteration).all())
        and (folder / "model" / "weights").read_bytes() == bytes([iteration]) * 1000
        and (folder / "rng-rank0.pt").is_file()
    )


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    folder = save(tmp_path, 3)
    assert folder == tmp_path / "checkpoints" / "step-000003"
    assert is_whole(folder, 3)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]  # nothing temporary is left


def test_only_the_last_checkpoints_are_kept_and_the_best_always(tmp_path):
    save(tmp_path, 1, name="best")
    for i in range(1, 6):
        save(tmp_path, i, keep=2)
    assert [i for i, _ in list_checkpoints(tmp_path)] == [4, 5]
    assert is_whole(find_checkpoint(tmp_path, "best"), 1)
    save(tmp_path, 5, name="best")
    assert is_whole(find_checkpoint(tmp_path, "best"), 5)


def test_checkpoints_are_found_by_every_name_and_a_wrong_one_lists_what_there_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="it has none"):
        find_checkpoint(tmp_path)
    save(tmp_path, 3)
    save(tmp_path, 12)
    assert find_checkpoint(tmp_path).name == "step-000012"
    assert find_checkpoint(tmp_path, "3").name == find_checkpoint(tmp_path, "step-000003").name == "step-000003"
    with pytest.raises(FileNotFoundError, match=r"'best'.*step-000003, step-000012"):
        find_checkpoint(tmp_path, "best")


class Killed(BaseException):
    """Like SIGKILL: no handler of the code under test runs."""


def killed_at(monkeypatch, moment):
    """Make the file operation number `moment` (from 0) not happen, and none after it."""
    count = {"left": moment}

    def guard(module, name):
        original = getattr(module, name)

        def wrapped(*args, **kwargs):
            if count["left"] == 0:
                raise Killed
            count["left"] -= 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    for module, name in [
        (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (torch, "save"),
        (Path, "write_bytes"),
    ]:  # fmt: skip
        guard(module, name)
    return count


@pytest.mark.parametrize("name", ["best", None])
def test_a_kill_between_any_two_file_operations_leaves_a_complete_checkpoint(tmp_path, name):
    moments = 0
    while True:
        run_dir = tmp_path / str(moments)
        save(run_dir, 1)
        save(run_dir, 2, name=name)
        with pytest.MonkeyPatch.context() as patch:
            count = killed_at(patch, moments)
            try:
                save(run_dir, 3, keep=1 if name is None else None, name=name)
                finished = True
            except Killed:
                finished = False
        clean_up(run_dir)  # what the next start does
        if name is None:
            last = find_checkpoint(run_dir)
            assert is_whole(last) and last.name in ("step-000002", "step-000003")
        else:
            best = find_checkpoint(run_dir, "best")
            assert is_whole(best) and load_state(best)["iteration"] in (2, 3)
            assert is_whole(find_checkpoint(run_dir), 1)
        for _, folder in list_checkpoints(run_dir):
            assert is_whole(folder)  # also the older ones, which the kill may have found half deleted
        assert not [p for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")]
        save(run_dir, 4)
        assert is_whole(find_checkpoint(run_dir), 4)
        if finished and count["left"] > 0:
            break
        moments += 1
    assert moments > 8


def test_a_retired_checkpoint_is_put_back_unless_its_successor_is_there(tmp_path):
    save(tmp_path, 1, name="best")
    folder = tmp_path / "checkpoints"
    os.replace(folder / "best", folder / ".old-best")
    clean_up(tmp_path)
    assert is_whole(folder / "best", 1)
    shutil.copytree(folder / "best", folder / ".old-best")
    clean_up(tmp_path)
    assert [p.name for p in folder.iterdir()] == ["best"]


@pytest.mark.parametrize("failing", ["torch.save", "os.replace", "save_model"])
def test_an_operation_that_fails_is_reported_with_the_last_good_checkpoint(tmp_path, monkeypatch, failing):
    save(tmp_path, 1)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if failing == "save_model":
        with pytest.raises(CheckpointError, match=r"the disk is full.*step-000001"):
            save_checkpoint(tmp_path, step_name(2), {}, fail, ALONE)
    else:
        monkeypatch.setattr(failing, fail)
        with pytest.raises(CheckpointError, match=r"the disk is full.*step-000001"):
            save(tmp_path, 2)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert is_whole(find_checkpoint(tmp_path), 1)


def test_a_failure_while_replacing_puts_the_old_one_back(tmp_path, monkeypatch):
    save(tmp_path, 1, name="best")
    original = os.replace

    def fail_on_publish(source, target):
        if Path(source).name.startswith(".writing-best"):
            raise OSError(5, "Input/output error")
        return original(source, target)

    monkeypatch.setattr(os, "replace", fail_on_publish)
    with pytest.raises(CheckpointError):
        save(tmp_path, 2, name="best")
    assert is_whole(find_checkpoint(tmp_path, "best"), 1)


def in_child(work):
    """Run `work` in a forked child; its return value is the exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            code = int(work() or 0)
        except BaseException:
            code = 99
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limit_file_size(size):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("part", ["state", "model"])
def test_a_full_disk_is_reported_and_the_last_good_checkpoint_still_loads(tmp_path, part):
    save(tmp_path, 1)

    def work():
        limit_file_size(50_000)  # the random state of one process takes 8 thousand bytes

        def safetensors_model(folder: Path) -> None:
            from safetensors.torch import save_file

            folder.mkdir()
            save_file({"w": torch.zeros(100_000)}, folder / "model.safetensors")

        try:
            if part == "state":
                save(tmp_path, 2, size=100_000)
            else:
                save_checkpoint(tmp_path, step_name(2), {"iteration": 2}, safetensors_model, ALONE)
        except CheckpointError as error:
            return 7 if "step-000001" in str(error) and "free the disk" in str(error) else 8
        return 0

    assert in_child(work) == 7
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert is_whole(find_checkpoint(tmp_path), 1)


def test_a_damaged_or_missing_state_names_the_file_and_the_way_out(tmp_path):
    folder = save(tmp_path, 1)
    state = folder / "training_state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"training_state.pt cannot be read.*delete"):
        load_state(folder)
    state.unlink()
    with pytest.raises(CheckpointError, match=r"is missing; delete"):
        load_state(folder)


def test_global_generators_go_on_where_they_were(tmp_path):
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        folder = save(tmp_path, 1)
        first = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        restore_rng(folder, rank=0)
        assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == first
        restore_rng(folder, rank=5)  # more processes than before: no error
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
