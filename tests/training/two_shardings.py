"""What `test_sharding.py` and `test_zero.py` run, on one process or, under a launcher, on two."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
import toy
from toy_blocks import BlockGenerator

import genrl.report
from genrl.algorithms import ForwardProcess, PolicyGradient
from genrl.networks.weights import current, is_sharded, local, whole

KL = {"steps": 4, "kl_weight": 0.1}
RUNS = {
    "all weights": lambda: (
        BlockGenerator(),
        PolicyGradient(**KL, inner_epochs=2, micro_batch=3, steps_per_forward=2),
        {"ema_decay": 0.9},
    ),
    "adapter": lambda: (
        BlockGenerator(lora=True),
        PolicyGradient(**KL, micro_batch=2, anchor="recompute"),
        {"latents_on_cpu": True, "activation_offload": True, "ema_decay": 0.5},
    ),
    "two experts": lambda: (BlockGenerator(experts=2), PolicyGradient(**KL), {}),
    "old policy": lambda: (BlockGenerator(), ForwardProcess(steps=4, old_decay=0.5, kl_weight=0.1), {}),
}


class SomeNan(toy.HalfBrightness):
    """Bright corners are not scored, so that processes train on different numbers of samples."""

    def __call__(self, media, prompts, metadata):
        values = super().__call__(media, prompts, metadata)
        return torch.where(media[:, 0, 0, 0] > 0.7, torch.nan, values)


class Killed(SomeNan):
    """Kills its process in the third iteration; the first evaluation is not counted on the other processes."""

    calls, loop = 0, None

    def __call__(self, media, prompts, metadata):
        self.calls += 1
        if self.calls == 1:
            (self.loop.run_dir / "sharing.txt").write_text(type(self.loop.updater.sharing).__name__)
        if self.calls == 3 and int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(media, prompts, metadata)


def make(folder, name, sharding, iterations, reward=None):
    generator, algorithm, settings = RUNS[name]()
    return toy.make_loop(
        folder, algorithm, generator=generator, reward=reward or SomeNan(),
        trainer={"iterations": iterations, "sharding": sharding, **settings},
        evaluation={"every": 1, "train_sampler": "always"},
    )  # fmt: skip


class Bright:
    """Mean of the picture."""

    differentiable, range, name = True, (0.0, 1.0), "bright"

    def __call__(self, media, prompts, metadata):
        return media.flatten(1).mean(1)


PIPELINES = {
    "sd3": ({}, {"ema_decay": 0.5}),  # all weights, saved as a pipeline
    "wan22": ({"lora": {"rank": 2, "alpha": 4}}, {}),  # two denoisers
}


def train_pipeline(folder, family, sharding):
    from genrl import tiny
    from genrl.generators.diffusers import DiffusersGenerator

    arguments, settings = PIPELINES[family]
    call = tiny.call_arguments(family)
    sizes = {key: call.pop(key, None) for key in ("height", "width", "num_frames")}
    generator = DiffusersGenerator(tiny.pipeline(family), guidance_scale=3.0, call=call, **sizes, **arguments)
    sizes = {"prompts_per_iteration": 2, "group_size": 4, "learning_rate": 1e-3, "iterations": 2}
    loop = toy.make_loop(
        folder, PolicyGradient(steps=3, kl_weight=0.1, micro_batch=2), generator=generator, reward=Bright(),
        trainer={"sharding": sharding, "allow_small_clip": True, "checkpoint_every": 0, **sizes, **settings},
        evaluation={"samples_per_prompt": 1},
    )  # fmt: skip
    loop.run()
    return {"weights": weights(loop), **facts(loop)}


def weights(loop):
    return torch.cat([whole(current(p)).flatten() for p in loop.generator.trainable()]).tolist()


def facts(loop):
    """How much of the weights, gradients, optimizer and averages this process holds."""
    parameters = loop.updater.parameters
    state = loop.updater.optimizer.state
    sets = [loop.updater.ema] if loop.updater.ema is not None else []
    module = loop.accelerator.unwrap_model(loop.generator.module)
    return {
        "strategy": type(loop.updater.sharing).__name__,
        "elements": sum(p.numel() for p in module.parameters()),
        "held": sum(local(p).numel() for p in module.parameters()),
        "trained": sum(p.numel() for p in parameters),
        "optimizer": sum(local(state[p]["exp_avg"]).numel() for p in parameters if p in state),
        "average": sum(v.numel() for s in sets for v in s.values),
        "all_sharded": all(is_sharded(p) for p in module.parameters()),
        "classes": sorted({type(m).__name__ for m in module.modules()}),
    }


def main(folder: Path, processes: int, others: Path | None) -> None:
    genrl.report.write_report = lambda run_dir: None
    rank = int(os.environ.get("RANK", 0))
    found = {}
    for sharding in ("none", "fsdp2") if processes > 1 else ("none",):
        for name in RUNS:
            key = f"{sharding}/{name}"
            loop = make(folder / key, name, sharding, 3)
            start = weights(loop)
            loop.run()
            assert loop.accelerator.num_processes == processes  # else the comparison would be of one with one
            again = make(folder / key, name, sharding, 4)
            again.run(resume="require")
            found[key] = {"start": start, "weights": weights(loop), "resumed": weights(again), **facts(loop)}
    for name in RUNS if others else ():  # what one process has saved
        if rank == 0:
            shutil.copytree(others / "none" / name, folder / "taken over" / name)
        loop.accelerator.wait_for_everyone()
        loop = make(folder / "taken over" / name, name, "fsdp2", 5)
        loop.run(resume="require")
        found[f"taken over/{name}"] = weights(loop)
    for family in PIPELINES:
        sharding = "fsdp2" if processes > 1 else "none"
        found[family] = train_pipeline(folder / family, family, sharding)
    if processes > 1:
        again = make(folder / "killed", "all weights", "fsdp2", 4)
        again.run(resume="require")
        found["killed"] = weights(again)
        found["killed from"] = [r["iteration"] for r in toy.rows(folder / "killed", "train")]
    (folder / f"result-{rank}.json").write_text(json.dumps(found))


def zero(folder: Path) -> None:
    """ZeRO-2 on CPUs; the shared-memory exchange that DeepSpeed would compile there takes minutes and is left out."""
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    genrl.report.write_report = lambda run_dir: None
    found = {}
    for name in RUNS:
        loop = make(folder / name, name, "zero2", 3)
        loop.run()
        again = make(folder / name, name, "zero2", 4)
        again.run(resume="require")
        state = again.optimization.optimizer._inner.state
        found[name] = {
            "weights": weights(loop), "resumed": weights(again),
            "trained": sum(p.numel() for p in again.optimization.parameters),
            "optimizer": sum(entry["exp_avg"].numel() for entry in state.values()),
        }  # fmt: skip
    (folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if sys.argv[2] == "kill":  # as the launcher's file says
        genrl.report.write_report = lambda run_dir: None
        reward = Killed()
        reward.loop = make(target / "killed", "all weights", "auto", 4, reward)
        reward.loop.run()
    elif sys.argv[2] == "zero":
        zero(target)
    else:
        main(target, int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
