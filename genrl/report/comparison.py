"""Curves of several runs on the same axes, averaged over seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from genrl.report.charts import COLOURS, Series, line_chart, number
from genrl.report.data import NAN, RunData, load_run, mean
from genrl.report.page import absent, chart_grid, details, page, pairs, section, table, write_page
from genrl.report.sections import final_cost, wall_seconds
from genrl.report.views import (
    ROLES,
    SAMPLERS,
    STEP_AXIS,
    Gauge,
    against_cost,
    gauges,
    over_iterations,
    reward_names,
    step_ids,
    step_means,
    step_times,
)

SEED = re.compile(r"[-_. /]*(seed|s)[-_=]?\d+$")
Runs = Sequence[str | Path] | Mapping[str, Sequence[str | Path]]
TRAINING = ("kl/reference", "kl/old", "ratio/clip_fraction", "grad/norm", "time/iteration")
STEPS = {
    "log_ratio_mean": "Log-ratio: mean",
    "log_ratio_std": "Log-ratio: standard deviation",
    "normalized_mean": "Normalised log-ratio: mean",
    "normalized_std": "Normalised log-ratio: standard deviation",
    "clip_fraction": "Clip fraction",
}


@dataclass(frozen=True)
class Method:
    """Runs of one method, which differ in their seed."""

    label: str
    runs: list[RunData]
    colour: int


def write_comparison(run_dirs: Runs, out: str | Path, title: str) -> Path:
    """Writes one self-contained page that overlays the curves of several runs.

    Args:
        run_dirs: run directories; those whose `name` is equal up to a seed at its end (`grpo-seed1`, `grpo_s2`) are one
            method and are averaged. Or a mapping from label to run directories, which says it explicitly.
        out: the HTML file; its folder is created.
        title: heading of the page, plain text.

    Returns:
        `out` as a path. Lines are means over the seeds of a method, bands reach from the lowest to the highest seed.

    Raises:
        FileNotFoundError: one of `run_dirs` is not a folder.
        ValueError: no run is given.
    """
    methods = _methods(run_dirs)
    body = f"<header><h1>{escape(title)}</h1>{_chips(methods)}</header>"
    body += _table(methods) + _evaluations(methods) + _steps(methods) + _training(methods) + _origin(methods)
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    return write_page(file, page(title, body))


def _methods(run_dirs: Runs) -> list[Method]:
    groups: dict[str, list[RunData]] = {}
    if isinstance(run_dirs, Mapping):
        groups = {label: [load_run(folder) for folder in folders] for label, folders in run_dirs.items() if folders}
    else:
        for folder in run_dirs:
            run = load_run(folder)
            groups.setdefault(SEED.sub("", run.name) or run.name, []).append(run)
    if not groups:
        raise ValueError("no run was given to compare: `run_dirs` is empty. Give at least one run directory.")
    return [Method(label, runs, colour) for colour, (label, runs) in enumerate(groups.items())]


def _chips(methods: list[Method]) -> str:
    return "".join(
        f'<span class="chip">{escape(m.label)}: {len(m.runs)} run{"s" if len(m.runs) > 1 else ""}</span>'
        for m in methods
    )


def _gauges(methods: list[Method]) -> list[Gauge]:
    found = {gauge.name: gauge for method in methods for run in method.runs for gauge in gauges(run)}
    shown = [gauge for gauge in found.values() if gauge.role != "statistic"]
    return sorted(shown, key=lambda gauge: ROLES.index(gauge.role))


def _over_seeds(label: str, lines: Sequence[Series], colour: int) -> Series:
    """Mean, lowest and highest of the lines at the positions that all of them share (all positions if none is)."""
    lines = [line for line in lines if line.has_values]
    if not lines:
        return Series(label, [], [])
    common = set(lines[0].x).intersection(*(line.x for line in lines[1:]))
    xs = sorted(common or {x for line in lines for x in line.x})
    columns = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    values = [[c[x] for c in columns if math.isfinite(c.get(x, NAN))] for x in xs]
    low: list[float] | None = [min(v, default=NAN) for v in values]
    high: list[float] | None = [max(v, default=NAN) for v in values]
    if len(lines) == 1:
        low, high = None, None
    return Series(label, xs, [mean(v) for v in values], low, high, colour, dashed=colour >= COLOURS)


def _line(method: Method, kind: str, name: str) -> Series:
    return _over_seeds(method.label, [over_iterations(run.table(kind), name) for run in method.runs], method.colour)


def _evaluations(methods: list[Method]) -> str:
    charts = []
    for sampler, sampler_text in SAMPLERS:
        for gauge in _gauges(methods):
            lines = [_line(method, "eval", f"{sampler}/{gauge.name}") for method in methods]
            charts.append(line_chart(f"{gauge.short}, {sampler_text}", lines))
            if sampler == "eval":
                costs = [_cost_line(method, line) for method, line in zip(methods, lines, strict=True)]
                charts.append(line_chart(f"{gauge.short}, against cost", costs, x_label="forward-equivalents"))
    rewards = dict.fromkeys(n for method in methods for run in method.runs for n in reward_names(run.table("train")))
    charts += [
        line_chart(f"Reward of the roll-outs: {name}", [_line(method, "train", f"reward/{name}") for method in methods])
        for name in rewards
    ]
    body = chart_grid(charts) or absent("None of the runs recorded an evaluation.")
    lead = "Lines are means over seeds; bands reach from the lowest to the highest seed."
    return section("Rewards and gauges", body, lead)


def _cost_line(method: Method, line: Series) -> Series:
    costs: dict[int, list[float]] = {}
    for run in method.runs:
        for iteration, row in run.table("train").items():
            costs.setdefault(iteration, []).append(row.get("cost/forward_equivalents", NAN))
    return against_cost(line, {i: {"cost/forward_equivalents": mean(c)} for i, c in sorted(costs.items())})


def _steps(methods: list[Method]) -> str:
    charts = []
    for name, title in STEPS.items():
        lines = []
        for method in methods:
            per_seed = [_over_steps(run, name) for run in method.runs]
            lines.append(_over_seeds(method.label, per_seed, method.colour))
        # A true axis of t: methods may take steps of different number and size.
        charts.append(line_chart(title, lines, x_label=STEP_AXIS, descending=True))
    body = chart_grid(charts) or absent("None of the runs recorded ratios by timestep (step_<k>/…) and their t.")
    return section("Ratios by timestep", body, "Averaged over each run.")


def _over_steps(run: RunData, name: str) -> Series:
    train = run.table("train")
    steps = step_ids(train)
    values = dict(zip(step_times(run, steps), step_means(train, steps, name), strict=True))
    points = [(round(t, 6), value) for t, value in values.items() if math.isfinite(t)]
    return Series("", [t for t, _ in points], [value for _, value in points])


def _training(methods: list[Method]) -> str:
    charts = [line_chart(name, [_line(method, "train", name) for method in methods]) for name in TRAINING]
    return section("Training signals", chart_grid(charts) or absent("No training iteration was recorded."))


def _table(methods: list[Method]) -> str:
    shown = _gauges(methods)
    keys = [(f"{sampler}/{gauge.name}", gauge, text) for sampler, text in SAMPLERS[:1] for gauge in shown]
    head = ["method", "runs", *(gauge.name for _, gauge, _ in keys), "cost", "wall time (s)"]
    rows = []
    for method in methods:
        cells = [escape(method.label), str(len(method.runs))]
        for key, _, _ in keys:
            lines = [over_iterations(run.table("eval"), key) for run in method.runs]
            last, first = _spread([line.y[-1] for line in lines if line.y]), mean(line.y[0] for line in lines if line.y)
            cells.append(f"{last}<small>before {number(first)}</small>" if math.isfinite(first) else "–")
        cells += [
            _spread([final_cost(run) for run in method.runs]),
            _spread([wall_seconds(run) for run in method.runs]),
        ]
        rows.append(cells)
    lead = "Last evaluation with the deterministic ODE: mean ± standard deviation over seeds."
    return section("Results", table(head, rows), lead)


def _spread(values: list[float]) -> str:
    kept = [value for value in values if math.isfinite(value)]
    if not kept:
        return "–"
    centre = mean(kept)
    if len(kept) == 1:
        return number(centre)
    return f"{number(centre)} ± {number(math.sqrt(math.fsum((v - centre) ** 2 for v in kept) / (len(kept) - 1)))}"


def _origin(methods: list[Method]) -> str:
    items = [(method.label, f"{run.folder.name}: {run.status()[1]}") for method in methods for run in method.runs]
    return section("Runs", details("Run directories", pairs(items)))
