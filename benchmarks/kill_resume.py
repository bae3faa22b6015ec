"""Kills a run with SIGKILL at random moments, resumes it, and compares it with an undisturbed run bit for bit.

    python benchmarks/kill_resume.py [--kills 60] [--seed 0]

Each round trains one method for 12 iterations; the run is killed again and again until 8 kills have hit it, then left
to finish. Metrics (all but timings) and the final checkpoint, optimizer and averages included, must be identical. The
generator is the tiny one of the tests, so that most kills hit saving, logging and evaluation rather than arithmetic.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import contextlib
import io
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import toy

from genrl.algorithms import ForwardProcess, PolicyGradient
from genrl.diffusion import CPS, RandomWindow
from genrl.objectives import RunningAdvantage
from genrl.training.checkpoint import list_checkpoints

ITERATIONS = 12
KILLS_A_ROUND = 8
METHODS: dict[str, Callable[[], Any]] = {
    "policy gradient": lambda: PolicyGradient(steps=3),
    "running advantage": lambda: PolicyGradient(
        CPS(), steps=4, window=RandomWindow(2), advantage=RunningAdvantage(), kl_weight=0.1, inner_epochs=2
    ),
    "forward process": lambda: ForwardProcess(steps=3, old_decay=0.5),
}


def run(folder: Path, method: str, every: int) -> None:
    """One quiet run, resumed when there is a checkpoint."""
    loop = toy.make_loop(
        folder,
        METHODS[method](),
        trainer={"iterations": ITERATIONS, "checkpoint_every": every, "ema_decay": 0.9, "warmup_updates": 9},
        evaluation={"every": 3, "train_sampler": "always"},
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        loop.run()


def in_child(work: Callable[[], None], kill_after: float | None) -> int:
    """Exit code of a forked child, which has everything imported already; negative when it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def identical(one: Path, other: Path) -> bool:
    states = [torch.load(list_checkpoints(f)[-1][1] / "training_state.pt", weights_only=True) for f in (one, other)]
    return toy.rows(one) == toy.rows(other) and same(*states)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    import genrl.report

    genrl.report.write_report = lambda run_dir: None  # drawing the report takes longer than the runs
    moments = random.Random(options.seed)
    kills, rounds, different = 0, Counter(), 0
    with tempfile.TemporaryDirectory() as name:
        run(Path(name) / "imports", "policy gradient", 1)  # the first run imports what later ones find
        while kills < options.kills:
            number = sum(rounds.values())
            method, every = list(METHODS)[number % len(METHODS)], 1 + number % 2
            straight, killed = Path(name) / f"straight-{number}", Path(name) / f"killed-{number}"
            began = time.perf_counter()
            run(straight, method, every)
            seconds = time.perf_counter() - began
            hits = 0
            while True:
                after = moments.uniform(0.0, 0.25) * seconds if hits < KILLS_A_ROUND else None
                code = in_child(lambda f=killed, m=method, e=every: run(f, m, e), after)  # type: ignore[misc]
                if code == 0:
                    break
                if code != -signal.SIGKILL:
                    raise SystemExit(f"resuming failed with exit code {code} after {kills + hits} kills in {killed}")
                hits += 1
            good = identical(straight, killed)
            different += not good
            kills += hits
            rounds[method] += 1
            verdict = "identical" if good else "DIFFERENT"
            print(f"{method:<18} checkpoint every {every}: {hits} kills, {verdict}", flush=True)
    print(f"\n{kills} kills in {sum(rounds.values())} runs of {ITERATIONS} iterations: {different} runs differ")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
