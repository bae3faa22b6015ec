"""Speed of evaluation with a policy in the loop, against simulators that only step.

    python benchmarks/rollout_throughput.py [--env metaworld/reach-v3 ...] [--cores 2] [--rows 16] [--rounds 5]

A policy plays episodes through the same pool, actor and runner as `genrl evaluate` with ``backend="async"``. Then the
same number of processes with bare simulators plays exactly the same episodes from their recorded actions: one
environment a process, nothing predicted, nothing sent. Both include resets; making environments is not timed. Rounds
alternate between the two, so that other load on the machine hits both, and medians are printed:

    steps/s      environment steps per second of wall time, over all processes
    share        policy in the loop / bare simulator
    cpu share    the same from CPU seconds of all processes: what the share would be on an otherwise idle machine
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("MUJOCO_GL", "egl")

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import numpy as np
import torch

from genrl.envs import EnvSettings, make_env
from genrl.envs.actors import ChunkActor
from genrl.envs.episodes import EpisodeRunner
from genrl.envs.rollout import ProcessPool
from genrl.networks import MLPBackbone
from genrl.policies import Chunking, FlowPolicy, Normalizer


def make_policy(env: Any, width: int, steps: int, chunking: Chunking) -> FlowPolicy:
    """A flow policy with random weights: with one step it costs what every one-step policy costs."""
    states = np.stack([env.reset(seed=s)[0]["state"] for s in range(8)])
    actions = np.random.default_rng(0).uniform(-1, 1, (64, *env.action_space.shape)).astype(np.float32)
    normalizer = Normalizer.fit({"state": states, "action": actions}, {"state": "meanstd", "action": "minmax"})
    policy = FlowPolicy(steps=steps, network=MLPBackbone(width=width), chunking=chunking)
    policy.configure(env.specs, actions.shape[1], normalizer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            if not parameter.any():  # the output layer starts at zero
                parameter.normal_(std=0.1, generator=generator)
    return policy.eval()


def bare(pipe: Any, settings: EnvSettings) -> None:
    """A process that plays (seed, actions) and answers with its wall and CPU seconds."""
    env = settings.make()
    env.reset(seed=0)
    pipe.send("ready")
    while (episodes := pipe.recv()) is not None:
        cpu, begun = time.process_time(), time.perf_counter()
        for seed, actions in episodes:
            env.reset(seed=seed)
            for action in actions:
                env.step(action)
        pipe.send((time.perf_counter() - begun, time.process_time() - cpu))


class Bare:
    """Processes with one simulator each."""

    def __init__(self, settings: EnvSettings, cores: int) -> None:
        self.pipes = []
        for _ in range(cores):
            ours, theirs = multiprocessing.Pipe()
            multiprocessing.Process(target=bare, args=(theirs, settings), daemon=True).start()
            ours.recv()
            self.pipes.append(ours)

    def play(self, episodes: list[tuple[int, np.ndarray]]) -> tuple[float, float]:
        """Wall and CPU seconds of all episodes, shared out among the processes."""
        begun = time.perf_counter()
        for i, pipe in enumerate(self.pipes):
            pipe.send(episodes[i :: len(self.pipes)])
        cpu = sum(pipe.recv()[1] for pipe in self.pipes)
        return time.perf_counter() - begun, cpu


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of processes so far."""
    total = 0.0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(env_id: str, options: argparse.Namespace) -> None:
    """One environment's row."""
    settings = EnvSettings.of(env_id, max_steps=options.steps)
    env = make_env(settings)
    chunking = Chunking(horizon=2 * options.execute, n_obs_steps=1, n_action_steps=options.execute)
    policy = make_policy(env, options.width, options.flow_steps, chunking)
    rows = options.rows * options.cores
    pool = ProcessPool(settings, rows, options.cores, stop_at_success=False)
    simulators = Bare(settings, options.cores)
    shape = env.action_space.shape
    warm = EpisodeRunner(ChunkActor(policy, rows, 0), pool, rows, 0, shape)
    warm.run(lambda: None)
    found: dict[str, list[float]] = {"policy": [], "bare": [], "policy cpu": [], "bare cpu": []}
    for _ in range(options.rounds):
        runner = EpisodeRunner(ChunkActor(policy, rows, 0), pool, options.episodes, 100, shape, keep_actions=True)
        pids = [os.getpid(), *(process.pid for process in pool._processes)]
        cpu = cpu_of(pids)
        runner.run(lambda: None)
        found["policy"].append(runner.seconds)
        found["policy cpu"].append(cpu_of(pids) - cpu)
        wall, cpu = simulators.play([(100 + i, runner.actions[i]) for i in range(options.episodes)])
        found["bare"].append(wall)
        found["bare cpu"].append(cpu)
    pool.close()
    steps = runner.steps
    middle = {name: statistics.median(values) for name, values in found.items()}
    shares = [b / p for b, p in zip(found["bare"], found["policy"], strict=True)]
    print(
        f"{env_id:28} {steps:6d} {steps / middle['bare']:9.0f} {steps / middle['policy']:9.0f} "
        f"{statistics.median(shares):7.2f} ({min(shares):.2f}-{max(shares):.2f}) "
        f"{middle['bare cpu'] / middle['policy cpu']:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--env", nargs="*", default=["metaworld/reach-v3", "metaworld/pick-place-v3", "robotics/FetchPush-v4"]
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16, help="environments a process")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="of an episode")
    parser.add_argument("--execute", type=int, default=4, help="actions executed of each chunk")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--flow-steps", type=int, default=1, help="network calls per chunk")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.cores} processes, {options.rows} environments each, {options.flow_steps} network calls a chunk, "
          f"{options.execute} actions of each executed")  # fmt: skip
    print(f"{'environment':28} {'steps':>6} {'bare/s':>9} {'policy/s':>9} {'share':>7} {'(range)':11} {'cpu share':>9}")
    for env_id in options.env:
        measure(env_id, options)


if __name__ == "__main__":
    main()
