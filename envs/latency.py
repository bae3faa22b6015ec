"""How long acting takes, without the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Latency:
    """Time of one call in milliseconds: median, 95th percentile, mean, number of calls; and where it was measured.

    device: what the network ran on; threads: torch threads of a CPU; batch: observations per call.
    """

    p50_ms: float
    p95_ms: float
    mean_ms: float
    calls: int
    batch: int
    device: str
    threads: int

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.device == "cpu" else ""
        return f"{self.p50_ms:.2f} ms (95 % under {self.p95_ms:.2f} ms), batch {self.batch}, {self.device}{threads}"


def measure_latency(
    call: Callable[[Any], Any],
    inputs: Sequence[Any],
    device: str = "cpu",
    calls: int = 100,
    warm_up: int = 10,
    batch: int = 1,
) -> Latency:
    """Time `call` on each of the inputs in turn.

    Before a clock is read the device has finished everything, so that a GPU's queue counts. `call` should take
    observations where a robot has them (in CPU memory) and give actions there, so that copies count too.

    Args:
        call: what is timed.
        inputs: at least one.
        device: ``"cpu"`` or ``"cuda..."``.
        calls: timed calls. warm_up: calls before them, which are not timed.
        batch: reported only.
    """
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    times = []
    for i in range(warm_up + calls):
        given = inputs[i % len(inputs)]
        wait()
        start = time.perf_counter()
        call(given)
        wait()
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - start))
    p50, p95 = np.percentile(times, [50, 95])
    return Latency(float(p50), float(p95), float(np.mean(times)), calls, batch, device, torch.get_num_threads())
