"""Metrics on disk, and the averages that become them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from genrl.prompts import Prompt
from genrl.report.data import METRICS, PROMPT_REWARDS


class Meter:
    """Running averages of scalar tensors that stay on their device until :meth:`result`.

    Names that end in ``_max`` or ``_min`` are reduced that way; a standard deviation ``x_std`` that comes with its
    mean (``x_mean`` or ``x``) is that of everything taken in, not the mean of the parts'; the others are means weighted
    by ``weight``.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}
        self._means: dict[str, str] = {}  # standard deviation -> its mean; kept as second moments until the end

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, metrics: Mapping[str, Tensor], weight: float = 1.0) -> None:
        for name, value in metrics.items():
            value = value.detach().float()
            mean = _mean_of(name, metrics)
            if mean is not None:
                self._means[name] = mean
                value = value**2 + metrics[mean].detach().float() ** 2
            old = self._sums.get(name)
            if name.endswith("_max"):
                self._sums[name] = value if old is None else torch.maximum(old, value)
            elif name.endswith("_min"):
                self._sums[name] = value if old is None else torch.minimum(old, value)
            else:
                self._sums[name] = value * weight if old is None else old + value * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self, accelerator: Any = None) -> dict[str, float]:
        """All values as floats, over all processes; one transfer from the device."""
        names = sorted(self._sums)
        if not names:
            return {}
        device = next(iter(self._sums.values())).device
        sums = torch.stack([self._sums[n].to(device) for n in names])  # [K]
        weights = torch.tensor([self._weights.get(n, 1.0) for n in names], device=device)
        if accelerator is not None and accelerator.num_processes > 1:
            table, shares = accelerator.gather(torch.stack([sums, weights])[None]).unbind(1)  # [W, K] each
            sums = torch.stack([_over_processes(n, table[:, i]) for i, n in enumerate(names)])
            extreme = torch.tensor([n.endswith(("_max", "_min")) for n in names], device=device)
            weights = torch.where(extreme, torch.ones_like(weights), shares.sum(0))
        values = sums / weights.clamp(min=1e-12)
        found = dict(zip(names, values.tolist(), strict=True))
        return found | {std: max(found[std] - found[mean] ** 2, 0.0) ** 0.5 for std, mean in self._means.items()}


def _mean_of(name: str, metrics: Mapping[str, Tensor]) -> str | None:
    base = name.removesuffix("_std")
    return None if base == name else next((n for n in (f"{base}_mean", base) if n in metrics), None)


def _over_processes(name: str, values: Tensor) -> Tensor:
    if name.endswith("_max"):
        return values.amax()
    return values.amin() if name.endswith("_min") else values.sum()


class RunWriter:
    """Appends to ``metrics.jsonl`` line by line, so that a killed run stays readable, and to TensorBoard.

    Rewards by prompt go to ``prompt_rewards.jsonl``, which a resumed run cuts in the same way.

    Args:
        run_dir: the run directory.
        keep_until: on resume, records of later iterations and a cut last line are removed first; None starts anew.
        tensorboard: also write TensorBoard events.
        enabled: False on all but the main process: nothing is written.
        evaluate_again: also remove the evaluation of iteration ``keep_until``, which will be done again.
    """

    def __init__(
        self,
        run_dir: Path,
        keep_until: int | None,
        tensorboard: bool,
        enabled: bool = True,
        evaluate_again: bool = False,
    ):
        self.enabled = enabled
        self._file: TextIO | None = None
        self._board: Any = None
        self._told: set[tuple[str, int]] = set()  # prompts whose text has been written
        if not enabled:
            return
        path = run_dir / METRICS
        kept = [] if keep_until is None else _records_until(path, keep_until, evaluate_again)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")
        self._prompts = run_dir / PROMPT_REWARDS
        rows = [] if keep_until is None else _records_until(self._prompts, keep_until, evaluate_again)
        if not rows:
            self._prompts.unlink(missing_ok=True)
        else:
            temporary = self._prompts.with_suffix(".tmp")
            temporary.write_text("".join(rows), encoding="utf-8")
            os.replace(temporary, self._prompts)  # a kill leaves the old file or the new one
            for record in map(json.loads, rows):
                self._told.update((record["kind"], int(place)) for place in record.get("text", ()))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if keep_until is None else keep_until + 1
            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def write(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        """One record; NaN and inf become null, which every JSON reader takes."""
        if self._file is None:
            return
        record = {"iteration": iteration, "kind": kind}
        record |= {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None and kind != "event":
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(name, value, iteration)
            self._board.flush()

    def write_prompts(self, kind: str, iteration: int, prompts: Sequence[Prompt], rewards: Mapping[int, float]) -> None:
        """Mean rewards by place of the prompt, as one record of ``prompt_rewards.jsonl``; a text comes once.

        ``{"iteration": 5, "kind": "eval", "prompt": [0, 1], "reward": [0.5, 0.25], "text": {"0": "a cat", ...}}``
        """
        if self._file is None:
            return
        new = [place for place in rewards if (kind, place) not in self._told]
        self._told.update((kind, place) for place in new)
        record = {"iteration": iteration, "kind": kind, "prompt": list(rewards)}
        record["reward"] = [round(v, 6) if math.isfinite(v) else None for v in rewards.values()]
        if new:
            record["text"] = {str(place): prompts[place].text for place in new}
        with self._prompts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when the record was written
                self._file.close()
        if self._board is not None:
            self._board.close()


def _records_until(path: Path, iteration: int, evaluate_again: bool) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a kill cut
        if not isinstance(record, dict) or record.get("iteration", 0) > iteration:
            continue
        if not (evaluate_again and record["kind"] == "eval" and record["iteration"] == iteration):
            kept.append(line + "\n")
    return kept


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old or the new file, never a part of one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2), encoding="utf-8")
    os.replace(temporary, path)
