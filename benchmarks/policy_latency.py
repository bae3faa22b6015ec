"""What acting costs beyond the network, and how much faster one step is than a hundred.

    python benchmarks/policy_latency.py [--network mlp] [--batch 1 64] [--rounds 300] [--compiled] [--onnx]

For every policy of genrl.policies, in one process and with one thread: the bare network (one forward pass on ready
tensors in inference mode), the encoder with normalisation, and `act`, which does everything from raw observations to
actions in their units. The three take turns, so that a busy machine slows all of them and none finds colder caches, and
the median of the rounds counts. On a CPU the clock is the thread's own time, since other programs interrupt long calls
more often than short ones (`--clock wall` for the other); on CUDA it is wall time with a synchronisation around every
call. The last column is how many times faster `act` is than that of the 100-step DDPM on the same network.

The task is Meta-World's: a state of 39 numbers, one observation, 8 actions of 4 numbers, 4 executed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import inspect
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import genrl.policies
from genrl.networks import Backbone, DiTBackbone, MLPBackbone, ObsSpec, UNetBackbone
from genrl.policies import Chunking, ChunkPolicy, CompiledPolicy, FlowPolicy, Normalizer, OnnxPolicy, export_onnx

STATE, ACTION = 39, 4
CHUNKING = Chunking(horizon=8, n_obs_steps=1, n_action_steps=4)
NETWORKS: dict[str, Backbone] = {"mlp": MLPBackbone(), "unet": UNetBackbone((128, 256)), "dit": DiTBackbone(128, 3, 4)}
SLOW = 20  # network calls per chunk from which on fewer rounds are enough


@dataclass(frozen=True)
class Latency:
    """Medians in seconds of one policy at one batch size."""

    name: str
    nfe: int
    network: float
    encoder: float
    act: float

    @property
    def overhead(self) -> float:
        """act over (encoder + nfe networks)."""
        return self.act / (self.encoder + self.nfe * self.network)


@dataclass(frozen=True)
class Deployed:
    """A policy and another way to act with it."""

    policy: ChunkPolicy
    other: CompiledPolicy | OnnxPolicy

    def act(self, obs: dict[str, torch.Tensor], generator: torch.Generator) -> torch.Tensor:
        return self.other.act(obs, generator)


def policies(network: Backbone, device: str) -> dict[str, ChunkPolicy]:
    """One of every class, with its defaults, and flow matching with one and ten steps."""
    made: dict[str, ChunkPolicy] = {}
    for name in genrl.policies.__all__:
        cls = getattr(genrl.policies, name)
        if inspect.isclass(cls) and issubclass(cls, ChunkPolicy) and cls is not ChunkPolicy:
            for settings in [{"steps": 1}, {"steps": 10}] if cls is FlowPolicy else [{}]:
                policy = cls(network=network, chunking=CHUNKING, **settings)
                rng = np.random.default_rng(0)
                data = {"state": rng.normal(size=(100, STATE)), "action": rng.uniform(-1, 1, size=(100, ACTION))}
                specs = {"state": ObsSpec((STATE,), "state")}
                policy.configure(specs, ACTION, Normalizer.fit(data, policy.normalization.modes(specs)))
                made[f"{name}({policy.nfe})"] = policy.to(device).eval()
    return made


def medians(runs: list[Callable[[], object]], rounds: int, device: str, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each run; they take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(-rounds // 10 - 3, rounds):
        for index, run in enumerate(runs):
            _synchronise(device)
            start = clock()
            run()
            _synchronise(device)
            if turn >= 0:  # those before warm up
                times[index].append(clock() - start)
    return [statistics.median(values) for values in times]


def measure(
    name: str, acting: ChunkPolicy | Deployed, batch: int, rounds: int, device: str, clock: Callable[[], float]
) -> Latency:
    """Latencies of a policy, or of another way to act with it, at one batch size."""
    policy = acting.policy if isinstance(acting, Deployed) else acting
    generator = torch.Generator(device).manual_seed(0)
    obs = {"state": torch.randn(batch, 1, STATE, device=device, generator=generator)}
    x = torch.randn(batch, CHUNKING.horizon, ACTION, device=device, generator=generator)
    one, zero = torch.ones(batch, device=device), torch.zeros(batch, device=device)
    cond = policy.encode(obs).detach()

    def network() -> object:
        with torch.inference_mode():
            return policy.net(x, one, cond, zero) if policy.interval else policy.net(x, one, cond)

    def encoder() -> object:
        with torch.inference_mode():
            return policy.encode(obs)

    def act() -> object:
        return acting.act(obs, generator)

    rounds = max(rounds // 10, 5) if policy.nfe >= SLOW else rounds
    return Latency(name, policy.nfe, *medians([network, encoder, act], rounds, device, clock))


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(latencies: list[Latency], batch: int) -> None:
    """A table, slowest last."""
    slowest = next((row.act for row in latencies if row.nfe == 100), None)
    print(f"\nbatch {batch}")
    print(
        f"{'policy(network calls)':28}{'network':>12}{'encoder':>12}{'act':>12}{'act / parts':>13}{'against DDPM':>14}"
    )
    for row in sorted(latencies, key=lambda row: row.act):
        times = "".join(f"{seconds * 1e6:12.0f}us" for seconds in (row.network, row.encoder, row.act))
        faster = "" if slowest is None else f"{slowest / row.act:13.0f}x"
        print(f"{row.name:32}{times}{row.overhead:14.2f}{faster}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clock", choices=["auto", "wall"], default="auto")
    parser.add_argument("--compiled", action="store_true", help="one-step policies also through CompiledPolicy")
    parser.add_argument("--onnx", action="store_true", help="one-step policies also through OnnxPolicy")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    made: dict[str, Any] = policies(NETWORKS[arguments.network], arguments.device)
    if arguments.compiled:
        mode = "cuda_graph" if arguments.device == "cuda" else "compile"
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            made |= {f"{mode} {n}": Deployed(p, CompiledPolicy(p, mode)) for n, p in made.items() if p.nfe == 1}
    if arguments.onnx:
        with tempfile.TemporaryDirectory() as folder:
            for name, policy in list(made.items()):
                if isinstance(policy, ChunkPolicy) and policy.nfe == 1:
                    exported = OnnxPolicy(export_onnx(policy, Path(folder) / "policy.onnx"))
                    made[f"onnx {name}"] = Deployed(policy, exported)
    weights = sum(p.numel() for p in next(iter(made.values())).net.parameters())
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.network} of {weights / 1e6:.2f} M weights")
    own_time = arguments.device == "cpu" and arguments.clock == "auto"
    clock = time.thread_time if own_time else time.perf_counter
    for batch in arguments.batch:
        report([measure(n, p, batch, arguments.rounds, arguments.device, clock) for n, p in made.items()], batch)


if __name__ == "__main__":
    main()
