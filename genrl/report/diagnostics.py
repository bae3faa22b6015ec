"""The second half of the report: how the run learned. Ratios by timestep, training signals, time, cost, set-up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any

from genrl.report.charts import Series, line_chart, number
from genrl.report.data import NAN, RunData, mean
from genrl.report.page import absent, chart_grid, details, duration, pairs, section, table
from genrl.report.sections import final_cost, wall_seconds
from genrl.report.views import (
    STEP_AXIS,
    Table,
    over_iterations,
    parts_of_run,
    step_ids,
    step_means,
    step_names,
    step_ticks,
)

# (title, metrics with their labels) of the charts over iterations.
TRAINING = (
    ("KL to the reference", {"kl/reference": "KL to the reference"}),
    ("KL to the roll-out policy", {"kl/old": "KL to the roll-out policy"}),
    ("Loss", {"loss/total": "loss"}),
    ("Gradient norm", {"grad/norm": "gradient norm, before clipping"}),
    ("Ratio", {"ratio/mean": "mean", "ratio/min": "min", "ratio/max": "max"}),
    ("Clip fraction", {"ratio/clip_fraction": "clip fraction"}),
    ("First-step gap", {"ratio/first_step_gap": "|log-ratio| of unchanged weights"}),
    (
        "Groups that teach nothing",
        {"advantage/zero_std_groups": "all rewards equal", "advantage/nan_share": "not scored"},
    ),
    ("Learning rate", {"lr": "learning rate"}),
)
POLICY_TRAINING = (
    ("Loss", {"loss/total": "loss"}),
    ("Gradient norm", {"grad/norm": "mean, before clipping", "grad/norm_max": "largest"}),
    ("Learning rate", {"lr": "learning rate"}),
)
TIMES = (("time/rollout", "roll-out"), ("time/reward", "reward"), ("time/update", "update"))
SHOWN = ("reward/", "step_", "time/", "cost/")  # have sections of their own


def ratios(run: RunData) -> str:
    title = "Ratios by timestep"
    train = run.table("train")
    steps = step_ids(train)
    if not steps:
        text = "No ratio by timestep was recorded (step_<k>/…): this method has none, or no update was made."
        return section(title, absent(text))
    position = [float(i) for i in range(len(steps))]
    ticks = step_ticks(run, steps)
    parts = parts_of_run(train)

    def lines(name: str) -> list[Series]:
        return [
            Series(label, position, step_means(rows, steps, name), colour=c) for c, (label, rows) in enumerate(parts)
        ]

    def chart(heading: str, series: list[Series]) -> str:
        return line_chart(heading, series, x_label=STEP_AXIS, x_ticks=ticks)

    predicted = [-value for value in step_means(train, steps, "kl_old")]
    shift = Series("predicted −KL, whole run", position, predicted, colour=5, dashed=True)
    charts = [
        chart("Log-ratio: mean, and the predicted left shift", [*lines("log_ratio_mean"), shift]),
        chart("Log-ratio: standard deviation", lines("log_ratio_std")),
        chart("Normalised log-ratio: mean", lines("normalized_mean")),
        chart("Normalised log-ratio: standard deviation", lines("normalized_std")),
        chart("Clip fraction", lines("clip_fraction")),
    ]
    names = ("t", "log_ratio_mean", "kl_old", "log_ratio_std", "normalized_mean", "normalized_std", "clip_fraction")
    missing = [name for name in names[1:] if not any(map(math.isfinite, step_means(train, steps, name)))]
    body = chart_grid(charts)
    if missing:
        body += absent(f"Not recorded: {', '.join(f'step_<k>/{name}' for name in missing)}.")
    others = [name for name in step_names(train) if name not in names]
    columns = {name: step_means(train, steps, name) for name in (*names, *others)}
    columns["kl_old"] = predicted
    rows = [[str(step), *(_cell(columns[name][i]) for name in columns)] for i, step in enumerate(steps)]
    head = [
        "step k",
        "t",
        "mean",
        "predicted −KL",
        "std",
        "normalised mean",
        "normalised std",
        "clip fraction",
        *others,
    ]
    body += details("Numbers by timestep, averaged over the run", table(head, rows))
    lead = (
        "A ratio is 1 on average, so its logarithm must average −KL, left of zero. A clip range symmetric around zero "
        "then binds unequally; the normalised log-ratio removes the shift and the step's noise level."
    )
    return section(title, body, lead)


def _cell(value: float) -> str:
    return number(value) if math.isfinite(value) else "–"


def training(run: RunData) -> str:
    train = run.table("train")
    if not train:
        return section("Training signals", absent("No training iteration was recorded."))
    charts, missing = [], []
    policy = run.run.get("kind") == "policy"
    for title, metrics in POLICY_TRAINING if policy else TRAINING:
        lines = [over_iterations(train, name, label, colour) for colour, (name, label) in enumerate(metrics.items())]
        charts.append(line_chart(title, lines))
        missing += [name for name, line in zip(metrics, lines, strict=True) if not line.has_values]
    body = chart_grid(charts)
    if missing:
        body += absent(f"Not recorded by this method: {', '.join(missing)}.")
    gates = [name for name in dict.fromkeys(n for row in train.values() for n in row) if name.startswith("gate/")]
    lines = [over_iterations(train, name, name.removeprefix("gate/"), i) for i, name in enumerate(gates)]
    body += chart_grid([line_chart("Gates: share of samples that count", lines)] if lines else [])
    drawn = {*gates} | {name for _, metrics in (*TRAINING, *POLICY_TRAINING) for name in metrics}
    names = dict.fromkeys(name for row in train.values() for name in row)
    others = [name for name in names if name not in drawn and not name.startswith(SHOWN)]
    rest = chart_grid(line_chart(name, [over_iterations(train, name)]) for name in others)
    if rest:
        body += details(f"Other metrics ({len(others)})", rest)
    return section("Training signals", body)


def time_and_cost(run: RunData) -> str:
    title = "Time and cost"
    train = run.table("train")
    totals = {label: _total(train, name) for name, label in TIMES}
    known = {label: value for label, value in totals.items() if value > 0}
    facts = [("wall time", duration(wall_seconds(run)) if math.isfinite(wall_seconds(run)) else "not recorded")]
    cost = final_cost(run)
    facts.append(("forward-equivalents", number(cost) if math.isfinite(cost) else "not recorded"))
    body = ""
    if known:
        # Rewards run beside the next roll-out, so the parts may add up to more than the iterations took.
        rest = _total(train, "time/iteration") - sum(known.values())
        if rest > 0.01 * sum(known.values()):
            known["other"] = rest
        body += _split(known)
    lines = [over_iterations(train, name, label, colour) for colour, (name, label) in enumerate(TIMES)]
    charts = [
        line_chart("Seconds an iteration", lines),
        line_chart("Forward-equivalents, cumulative", [over_iterations(train, "cost/forward_equivalents")]),
    ]
    body += chart_grid(charts)
    if not known:
        body += absent("No times (time/rollout, time/reward, time/update) were recorded.")
    per_iteration = mean(row.get("time/iteration", NAN) for row in train.values())
    if math.isfinite(per_iteration):
        facts.append(("mean of an iteration", duration(per_iteration)))
    return section(title, f'<div class="card">{pairs(facts)}</div><p></p>{body}')


def _total(train: Table, name: str) -> float:
    return math.fsum(value for row in train.values() if math.isfinite(value := row.get(name, NAN)))


def _split(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    colours = {label: i for i, (_, label) in enumerate(TIMES)} | {"other": 5}
    bars = "".join(
        f'<i class="c{colours[label]}" style="flex:{value / total:.4f}" title="{escape(label)}: {duration(value)}"></i>'
        for label, value in seconds.items()
    )
    keys = "".join(
        f'<span class="key c{colours[label]}"><i></i>{escape(label)} {duration(value)}'
        f" ({100 * value / total:.0f} %)</span>"
        for label, value in seconds.items()
    )
    return f'<div class="split">{bars}</div><div class="legend">{keys}</div>'


def setup(run: RunData) -> str:
    body = ""
    command = run.run.get("command")
    if command:
        text = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        body += f'<h3>Command</h3><pre class="wrap">{escape(text)}</pre>'
    for key, title in (("sizes", "Sizes"), ("versions", "Versions")):
        items = list(_flat(run.run.get(key)))
        if items:
            body += f'<h3>{title}</h3><div class="card">{pairs(items)}</div>'
    schedule = run.run.get("times")
    if isinstance(schedule, list) and schedule:
        trained = run.run.get("trained_steps")
        items = [("times t of the sampler", ", ".join(map(_text, schedule)))]
        if isinstance(trained, list):
            items.append(("trained steps k", ", ".join(map(_text, trained))))
        body += f'<h3>Schedule</h3><div class="card">{pairs(items)}</div>'
    if run.config_text:
        body += details("Config (config.yaml)", f"<pre>{escape(run.config_text)}</pre>")
    return section("Set-up", body or absent("Neither run.json nor config.yaml is there."))


def problems(run: RunData) -> str:
    if not run.problems:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in run.problems)
    return section("What is missing in this run directory", f'<div class="card"><ul class="list">{items}</ul></div>')


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return []
    items = []
    for key, part in value.items():
        name = f"{prefix}{key}"
        items += _flat(part, f"{name}.") if isinstance(part, dict) else [(name, _text(part))]
    return items


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    return number(value) if isinstance(value, float) else json.dumps(value)
