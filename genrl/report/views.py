"""What the report and the comparison both need: which metrics there are, and their series over iterations and steps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from genrl.report.charts import Series
from genrl.report.data import NAN, RunData, as_float, mean

Table = Mapping[int, Mapping[str, float]]  # iteration -> metrics
SAMPLERS = (("eval", "deterministic ODE"), ("eval_train_sampler", "training sampler"))
STEP_AXIS = "t of the step, from noise (1) to data (0)"
SPREAD = re.compile(r"(^|[_/])(spread|diversity)|_(std|nn|rec)$")
SPREAD_TEXT = {
    "std": "spread within a prompt",
    "nn": "sample to nearest real",
    "rec": "real to nearest sample",
}


ROLES = ("proxy", "gauge", "spread", "statistic")
NOT_MEASURED = ("weight_change", "uses_ema")  # logged with an evaluation, but not of its samples


@dataclass(frozen=True)
class Gauge:
    """One evaluated number.

    `role` is `"proxy"` (trained on), `"gauge"` (only logged), `"spread"` or `"statistic"` (of the pictures).
    """

    name: str
    role: str

    @property
    def meaning(self) -> str:
        if self.role == "spread":
            return SPREAD_TEXT.get(self.name.rsplit("_", 1)[-1], "spread")
        if self.role == "statistic":
            return "statistic of the pictures"
        return "proxy: the trained reward" if self.role == "proxy" else "gauge, not trained on"

    @property
    def short(self) -> str:
        if self.role == "statistic":
            return self.name.removeprefix("stats/")
        return f"{self.name}: {self.meaning}" if self.role == "spread" else f"{self.name} ({self.role})"


def reward_names(train: Table) -> list[str]:
    """Names of the trained rewards, from `reward/<name>`."""
    return [name for name in _names(train, "reward/") if not name.endswith("_std")]


def gauges(run: RunData) -> list[Gauge]:
    """Everything that was evaluated, proxies first, spread last."""
    rewards = set(reward_names(run.table("train")))
    table = run.table("eval")
    names = list(dict.fromkeys(name for sampler, _ in SAMPLERS for name in _names(table, f"{sampler}/")))
    known = set(names)
    found = []
    for name in names:
        if any(name.endswith(end) and name.removesuffix(end) in known for end in ("_low", "_high", "_std")):
            continue  # belongs to the number before the suffix
        if name == "reward" and len(rewards - {"total"}) == 1:
            continue  # the sum of one reward is that reward
        if name not in NOT_MEASURED:
            found.append(Gauge(name, _role(name, rewards)))
    return sorted(found, key=lambda gauge: ROLES.index(gauge.role))


def _role(name: str, rewards: set[str]) -> str:
    if name in rewards or name.startswith("reward"):
        return "proxy"
    if name.startswith("stats/"):
        return "statistic"
    return "spread" if SPREAD.search(name) else "gauge"


def _names(table: Table, prefix: str) -> list[str]:
    return list(
        dict.fromkeys(key.removeprefix(prefix) for row in table.values() for key in row if key.startswith(prefix))
    )


def over_iterations(table: Table, name: str, label: str = "", colour: int = 0, dashed: bool = False) -> Series:
    """A metric over iterations, with `<name>_low` and `<name>_high` as its band if they exist."""
    kept = {number: row for number, row in table.items() if name in row}
    low = [row.get(f"{name}_low", NAN) for row in kept.values()]
    high = [row.get(f"{name}_high", NAN) for row in kept.values()]
    banded = any(math.isfinite(value) for value in low)
    y = [row[name] for row in kept.values()]
    return Series(label or name, list(kept), y, low if banded else None, high if banded else None, colour, dashed)


def against_cost(one: Series, train: Table) -> Series:
    """The same line with cumulative forward-equivalents as its axis; points without a known cost are dropped."""
    costs = {
        number: row["cost/forward_equivalents"] for number, row in train.items() if "cost/forward_equivalents" in row
    }
    points = []
    for i, number in enumerate(one.x):
        spent = [cost for iteration, cost in costs.items() if iteration <= number and math.isfinite(cost)]
        # Evaluation 0 is before training; later ones without a record of their cost are unknown.
        if spent or (number == 0 and costs):
            points.append((i, max(spent, default=0.0)))
    pick = [i for i, _ in points]
    low = [one.low[i] for i in pick] if one.low is not None else None
    high = [one.high[i] for i in pick] if one.high is not None else None
    return Series(one.label, [cost for _, cost in points], [one.y[i] for i in pick], low, high, one.colour, one.dashed)


def by_unit(series: list[Series]) -> list[list[Series]]:
    """Lines that may share an axis: all those within [0, 1] together, every other one alone."""
    shares = [one for one in series if one.has_values and all(0 <= v <= 1 for v in one.y if math.isfinite(v))]
    others = [[one] for one in series if one.has_values and one not in shares]
    return ([shares] if shares else []) + others


def step_ids(train: Table) -> list[int]:
    """The timesteps k that have metrics `step_<k>/...`, ascending (from noise to data)."""
    return sorted(
        {int(match.group(1)) for row in train.values() for key in row if (match := re.match(r"step_(\d+)/", key))}
    )


def step_names(train: Table) -> list[str]:
    """The `<name>` of all metrics `step_<k>/<name>`."""
    found = (re.match(r"step_\d+/(.+)", key) for row in train.values() for key in row)
    return list(dict.fromkeys(match.group(1) for match in found if match))


def step_times(run: RunData, steps: list[int]) -> list[float]:
    """t of every step, from the metrics or else from run.json; NaN where it is not known."""
    known, times = step_means(run.table("train"), steps, "t"), run.run.get("times")
    if not isinstance(times, list):
        return known
    spare = [as_float(times[step]) if step < len(times) else NAN for step in steps]
    return [t if math.isfinite(t) else other for t, other in zip(known, spare, strict=True)]


def step_ticks(run: RunData, steps: list[int]) -> list[tuple[float, str]]:
    """(position, t) of every step; the number of the step where t is not known."""
    ticks = [
        (float(position), f"{t:.2f}" if math.isfinite(t) else f"k={step}")
        for position, (step, t) in enumerate(zip(steps, step_times(run, steps), strict=True))
    ]
    stride = math.ceil(len(ticks) / 12)
    return ticks[::stride]


def step_means(train: Table, steps: list[int], name: str) -> list[float]:
    """`step_<k>/<name>` averaged over the iterations of `train`, for every k."""
    return [mean(row.get(f"step_{step}/{name}", NAN) for row in train.values()) for step in steps]


def parts_of_run(train: Table) -> list[tuple[str, Table]]:
    """The whole run and, where there are enough iterations, its first and last third."""
    numbers = list(train)
    third = len(numbers) // 3
    if third < 1:
        return [("whole run", train)]
    early, late = numbers[:third], numbers[-third:]
    return [
        ("whole run", train),
        (f"early, iterations {_span(early)}", {number: train[number] for number in early}),
        (f"late, {_span(late)}", {number: train[number] for number in late}),
    ]


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
