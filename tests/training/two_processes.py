"""What `test_processes.py` runs, on one process or, under torchrun, on two."""

import json
import os
import sys
from pathlib import Path

import torch
import toy

import genrl.report
from genrl.algorithms import ForwardProcess, PolicyGradient
from genrl.diffusion import FixedWindow
from genrl.rewards import RewardError
from genrl.training import TrainingError

RUNS = {
    "policy_gradient": lambda: (
        PolicyGradient(steps=4, kl_weight=0.1, inner_epochs=2, micro_batch=3, steps_per_forward=2),
        {"ema_decay": 0.9, "warmup_updates": 5, "device": "auto"},
    ),
    "best_and_worst": lambda: (
        PolicyGradient(steps=4, window=FixedWindow(1, 2), group_noise=True, share_prefix=True, keep_per_group=1),
        {"rollout_batch": 5},
    ),
    "forward_process": lambda: (ForwardProcess(steps=4, old_decay=0.5), {}),
}


class FailsOnOne(toy.HalfBrightness):
    """Raises on the last process in the second iteration; evaluations are scored by the first process alone."""

    calls = 0

    def __call__(self, media, prompts, metadata):
        self.calls += 1
        if self.calls == 2 and int(os.environ.get("RANK", 0)) == 1:
            raise OSError("the reward server is gone")
        return super().__call__(media, prompts, metadata)


class SomeNan(toy.HalfBrightness):
    """Bright corners are not scored."""

    def __call__(self, media, prompts, metadata):
        values = super().__call__(media, prompts, metadata)
        return torch.where(media[:, 0, 0, 0] > 0.7, torch.nan, values)


def main(folder: Path, processes: int) -> None:
    genrl.report.write_report = lambda run_dir: None
    rank = int(os.environ.get("RANK", 0))
    found = {}
    for name, make in RUNS.items():
        algorithm, settings = make()
        tables = []
        original = algorithm.advantages

        def keep(rewards, weights, ids, original=original, tables=tables):
            result = original(rewards, weights, ids)
            tables.append([rewards["bright"].tolist(), result.values.tolist(), ids.tolist()])
            return result

        algorithm.advantages = keep
        loop = toy.make_loop(
            folder / name, algorithm, reward=SomeNan(),
            trainer={"iterations": 3, "processes": processes, "checkpoint_every": 1, **settings},
            evaluation={"every": 1, "train_sampler": "always"},
        )  # fmt: skip
        loop.run()
        assert loop.accelerator.num_processes == processes  # else the comparison would be of one with one
        found[name] = {"tables": tables, "weights": toy.weights(loop).tolist(), "cost": loop.cost}
        # Resumed on the same number of processes, for one more iteration.
        algorithm, settings = make()
        again = toy.make_loop(
            folder / name, algorithm, reward=SomeNan(),
            trainer={"iterations": 4, "processes": processes, "checkpoint_every": 1, **settings},
            evaluation={"every": 1, "train_sampler": "always"},
        )  # fmt: skip
        again.run(resume="require")
        found[name]["resumed"] = toy.weights(again).tolist()
    (folder / f"result-{rank}.json").write_text(json.dumps(found))
    failing = toy.make_loop(
        folder / "failing", PolicyGradient(steps=4), reward=FailsOnOne(), trainer={"checkpoint_every": 0}
    )
    try:
        failing.run()
    except (RewardError, TrainingError) as error:
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
