"""Parts and a program for tests of asynchronous roll-outs: `python asynchronous_run.py CONFIG` runs one."""

import os
import signal
import sys
import time

import toy


class SlowReward(toy.HalfBrightness):
    """Takes a while; in roll-out workers, which have a parent process, it may also do `what`.

    Args:
        seconds: per batch, in workers. what: "raise", "die" or nothing. after: batches until then.
    """

    def __init__(self, seconds: float = 0.0, what: str = "", after: int = 2):
        self.seconds, self.what, self.after, self.calls = seconds, what, after, 0

    def __call__(self, media, prompts, metadata):
        from multiprocessing.process import parent_process

        if parent_process() is None:
            return super().__call__(media, prompts, metadata)
        time.sleep(self.seconds)
        self.calls += 1
        if self.calls > self.after and self.what == "raise":
            raise OSError("the reward server is gone")
        if self.calls > self.after and self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(media, prompts, metadata)


def write_config(folder, algorithm="genrl.algorithms.Homing", reward=None, trainer=None, **asynchronous):
    """A configuration file of the toy."""
    import yaml

    config = {
        "run_dir": str(folder / "run"),
        "generator": {"class_path": "toy.ToyGenerator"},
        "prompts": {"class_path": "toy.ToyPrompts"},
        "reward": {"class_path": "asynchronous_run.SlowReward", "init_args": reward or {}},
        "algorithm": {"class_path": algorithm, "init_args": {"steps": 3}},
        "trainer": {
            "iterations": 6, "prompts_per_iteration": 4, "group_size": 4, "learning_rate": 1e-2, "checkpoint_every": 2,
            "preview_every": 0, "device": "cpu", "cpu_threads": 1, "tensorboard": False, **(trainer or {}),
            "asynchronous": asynchronous,
        },
        "evaluation": {"every": 0, "samples_per_prompt": 2, "steps": 2, "train_sampler": "never"},
    }  # fmt: skip
    path = folder / "asynchronous.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def make(path, *overrides):
    from genrl.config import build, load_config
    from genrl.training import Loop

    config = load_config(path, overrides)
    return Loop(**build(config), config=config.raw)


if __name__ == "__main__":
    make(sys.argv[1]).run()
