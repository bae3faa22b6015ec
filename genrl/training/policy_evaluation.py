"""Evaluation of a policy in its environment beside its training, in a process of its own when a core is free for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genrl.envs.settings import EnvSettings
from genrl.training.checkpoint import publish
from genrl.training.logging import write_json
from genrl.training.policy_settings import PolicyEvaluationSettings

FOLDER = "evaluations"


@dataclass(frozen=True)
class Assessment:
    """What was measured of the weights of an iteration."""

    iteration: int
    values: dict[str, float]
    folder: Path | None = None  # the exported policy that was measured


class Assessor:
    """Runs one evaluation at a time on an exported copy of the policy.

    Args:
        run_dir: evaluations are written below it.
        env: what is evaluated in; None evaluates nothing.
        settings: of the evaluation.
        threads: torch threads of the process that evaluates; the same number gives the same episodes.
        device: what the policy runs on.
    """

    def __init__(
        self,
        run_dir: Path,
        env: EnvSettings | None,
        settings: PolicyEvaluationSettings,
        threads: int | None = None,
        device: str = "cpu",
    ):
        self.run_dir, self.env, self.settings, self.threads, self.device = run_dir, env, settings, threads, device
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.background = cores > 1 if settings.background is None else settings.background
        self.active = env is not None and settings.episodes > 0
        self.pending: int | None = None  # iteration whose evaluation has begun and was not asked for yet
        self._values: dict[str, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = run_dir / FOLDER / "log.txt"

    def start(self, iteration: int, policy: Any, values: dict[str, float], wait: bool) -> None:
        """Begin to evaluate a policy; `values` are added to the result."""
        assert self.env is not None and self.pending is None
        filmed = self.settings.videos
        self.pending, self._values = iteration, dict(values)
        self._discard(self._snapshot(iteration))
        self._snapshot(iteration).parent.mkdir(parents=True, exist_ok=True)
        policy.save_pretrained(self._snapshot(iteration))
        job = {
            "policy": str(self._snapshot(iteration)),
            "env": self.env.to_dict(),
            "episodes": self.settings.episodes,
            "seed": self.settings.seed,
            "n_envs": self.settings.n_envs,
            "backend": self.settings.backend,
            "videos": filmed,
            "video_dir": str(self.run_dir / "videos" / f"iteration-{iteration:06d}") if filmed else None,
            "consistency_samples": self.settings.consistency_samples,
            "weights": "ema" if values.get("eval/uses_ema") else "raw",
            "out": str(self._result(iteration)),
            "threads": self.threads,
            "device": self.device,
        }
        if self.background and not wait:
            path = self._snapshot(iteration).with_name("job.json")
            write_json(path, job)
            self._log = path.with_name("log.txt")
            command = [sys.executable, "-m", "genrl.training.policy_evaluation", str(path)]
            with self._log.open("wb") as log:
                # In a session of its own: Ctrl-C is for the run, which waits for this evaluation and then saves.
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
                )
        else:
            carry_out(job, progress=True)

    def result(self) -> Assessment | None:
        """The evaluation that was begun, once it has ended; None when there is none.

        Raises:
            RuntimeError: when its process failed, with the last lines that it printed.
        """
        if self.pending is None:
            return None
        iteration = self.pending
        if self._process is not None:
            code = self._process.wait()
            self._process = None
            if code:
                self.pending = None
                lines = self._log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(
                    f"the evaluation of iteration {iteration} failed (exit code {code}): {' / '.join(lines[-3:])}"
                )
        self.pending = None
        found = json.loads(self._result(iteration).read_text())
        return Assessment(iteration, metrics_of(found) | self._values, self._snapshot(iteration))

    def keep_best(self, found: Assessment, policy: Any) -> None:
        """Put the measured policy in ``checkpoints/best``."""
        folder = self.run_dir / "checkpoints"
        temporary = folder / ".writing-best"
        self._discard(temporary)
        temporary.mkdir(parents=True)
        if found.folder is not None and found.folder.is_dir():
            shutil.copytree(found.folder, temporary / "model")
        else:
            policy.save_pretrained(temporary / "model")
        write_json(temporary / "evaluation.json", {"iteration": found.iteration, **found.values})
        publish(temporary, folder / "best")

    def discard(self, found: Assessment) -> None:
        """Remove the exported copy; what it measured stays."""
        if found.folder is not None:
            self._discard(found.folder.parent)

    def close(self) -> None:
        """Stop what is still running; its evaluation is done again when the run goes on."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _snapshot(self, iteration: int) -> Path:
        return self.run_dir / FOLDER / f".iteration-{iteration:06d}" / "policy"

    def _result(self, iteration: int) -> Path:
        return self.run_dir / FOLDER / f"iteration-{iteration:06d}.json"

    @staticmethod
    def _discard(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)


def metrics_of(evaluation: dict[str, Any]) -> dict[str, float]:
    """Numbers for the log from the JSON of an evaluation; clocks are not among them, so that runs can be compared."""
    summary = evaluation["summary"]
    names = {"success": "success_rate", "success_low": "success_low", "success_high": "success_high"}
    names |= {f"return{end}": f"total_reward{end}" for end in ("", "_low", "_high")}
    names |= {"episode_length": "length", "episodes": "episodes", "distinct_starts": "distinct_starts"}
    values = {f"eval/{name}": summary[key] for name, key in names.items()}
    return {name: float("nan") if value is None else float(value) for name, value in values.items()}


def carry_out(job: dict[str, Any], progress: bool = False) -> None:
    """Evaluate an exported policy as a job says and write the result."""
    from genrl.envs import evaluate
    from genrl.policies import load_policy

    found = evaluate(
        load_policy(job["policy"], job["device"]),
        EnvSettings.from_dict(job["env"]),
        episodes=job["episodes"],
        seed=job["seed"],
        n_envs=job["n_envs"],
        backend=job["backend"],
        videos=job["videos"],
        video_dir=job["video_dir"],
        weights=job["weights"],
        progress=progress,
        cpu_threads=job["threads"] or 1,
        **({"stac": job["consistency_samples"]} if job["consistency_samples"] else {}),
    )
    found.save(job["out"])


def main() -> int:
    """Carry out the job in the file that is named on the command line."""
    carry_out(json.loads(Path(sys.argv[1]).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
