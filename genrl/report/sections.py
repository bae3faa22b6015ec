"""The first half of the report: what the run achieved. Title, table before and after, alarms, samples, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from genrl.report.charts import Series, line_chart, number
from genrl.report.data import NAN, RunData, as_float, event_name, film_of, find_samples
from genrl.report.page import absent, chart_grid, details, duration, image, section, table
from genrl.report.views import SAMPLERS, Gauge, against_cost, by_unit, gauges, over_iterations, reward_names

STATUS_COLOUR = {"finished": "good", "interrupted": "warn", "unfinished": "warn", "failed": "bad"}
ALARM_WORDS = ("alarm", "guard", "fail", "error", "hack", "collapse", "nan", "interrupt", "refus", "warn")
MAX_STRIP = 12
LARGEST_FILM = 8 * 2**20  # bytes; a larger one is named instead of embedded


def header(run: RunData, tiles_of: Callable[[RunData], str] | None = None) -> str:
    word, sentence = run.status()
    chips = [f'<span class="chip">{escape(run.method)}</span>'] if run.method else []
    chips.append(f'<span class="chip {STATUS_COLOUR[word]}">{escape(sentence)}</span>')
    alarms = sum(is_alarm(event) for event in run.events)
    if alarms:
        chips.append(f'<span class="chip warn">{alarms} alarm{"s" if alarms > 1 else ""}</span>')
    facts = [
        ("started", run.run.get("started")),
        ("processes", run.run.get("processes")),
        ("seed", run.config.get("seed")),
    ]
    line = " · ".join(escape(f"{key} {value}") for key, value in facts if value is not None)
    meta = f'<p class="meta">{line}</p>' if line else ""
    return f"<header><h1>{escape(run.name)}</h1>{''.join(chips)}{meta}</header>{(tiles_of or _tiles)(run)}"


def wall_seconds(run: RunData) -> float:
    """Wall time of the run: from summary.json, else the sum of the iterations."""
    if "wall_seconds" in run.summary:
        return as_float(run.summary["wall_seconds"])
    spent = [row.get("time/iteration", NAN) for row in run.table("train").values()]
    return math.fsum(value for value in spent if math.isfinite(value)) or NAN


def final_cost(run: RunData) -> float:
    costs = [row.get("cost/forward_equivalents", NAN) for row in run.table("train").values()]
    return max((cost for cost in costs if math.isfinite(cost)), default=NAN)


def _tiles(run: RunData) -> str:
    before, after = before_after(run)
    shown = gauges(run)
    chosen = [g for g in shown if g.role == "proxy"][:1] + [g for g in shown if g.role == "gauge"][:2]
    chosen += [g for g in shown if g.role == "spread"][:1]
    found = []
    for gauge in chosen:
        sampler = next((s for s, _ in SAMPLERS if f"{s}/{gauge.name}" in after[1]), SAMPLERS[0][0])
        first, last = (row.get(f"{sampler}/{gauge.name}", NAN) for row in (before[1], after[1]))
        found.append(tile(gauge.short, number(last), f"before: {number(first)}"))
    cost, seconds = final_cost(run), wall_seconds(run)
    if math.isfinite(seconds):
        whole = "whole run" if "wall_seconds" in run.summary else "sum of the iterations"
        found.append(tile("wall time", duration(seconds), whole))
    if math.isfinite(cost):
        found.append(tile("cost", number(cost), "forward-equivalents"))
    return tiles(found)


def tile(name: str, value: str, foot: str) -> str:
    """One number at the top of a report."""
    return f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(foot)}</span></div>'


def tiles(found: list[str]) -> str:
    """Tiles in a row; nothing without one."""
    return f'<div class="tiles">{"".join(found)}</div>' if found else ""


def before_after(run: RunData) -> tuple[tuple[str, Mapping[str, float]], tuple[str, Mapping[str, float]]]:
    """((name, metrics) of the first evaluation, the same of the last); from summary.json where nothing is logged."""
    table_ = run.table("eval")
    if table_:
        first, last = next(iter(table_)), next(reversed(table_))
        return (_moment(first), table_[first]), (_moment(last), table_[last])
    return ("before", _floats(run.summary.get("before"))), ("after", _floats(run.summary.get("after")))


def _moment(iteration: int) -> str:
    return "before training" if iteration == 0 else f"iteration {iteration}"


def _floats(values: Any) -> dict[str, float]:
    return {str(key): as_float(value) for key, value in values.items()} if isinstance(values, dict) else {}


def references(run: RunData) -> dict[str, float]:
    """Gauge name -> value of real data, from `reference` of summary.json or run.json."""
    found = _floats(run.run.get("reference")) | _floats(run.summary.get("reference"))
    return {key.removeprefix("eval/"): value for key, value in found.items()}


def results(run: RunData) -> str:
    title = "Before and after"
    (before_name, before), (after_name, after) = before_after(run)
    shown = gauges(run)
    if not shown:
        return section(title, absent("No evaluation was recorded, so nothing can be compared."))
    real = references(run)
    rows: list[list[str] | str] = []
    for sampler, sampler_text in SAMPLERS:
        names = [gauge for gauge in shown if f"{sampler}/{gauge.name}" in after or f"{sampler}/{gauge.name}" in before]
        if not names:
            rows.append(f"{escape(sampler_text)} {absent('not evaluated')}")
            continue
        rows.append(f"Sampled with the {escape(sampler_text)}")
        for gauge in names:
            key = f"{sampler}/{gauge.name}"
            change = after.get(key, NAN) - before.get(key, NAN)
            sign = "+" if change > 0 else ""
            name = f"{escape(gauge.name)}<small>{escape(gauge.meaning)}</small>"
            cells = [name, _with_interval(before, key), _with_interval(after, key)]
            cells.append(
                f"{sign}{number(change)}{_share(gauge, change, before.get(key, NAN))}" if math.isfinite(change) else "–"
            )
            rows.append(cells + ([number(real[gauge.name]) if gauge.name in real else "–"] if real else []))
    head = ["", before_name, after_name, "change", *(["real data"] if real else [])]
    lead = "Held-out prompts under fixed noise; in brackets the 95 % interval, where one was measured."
    if before_name == after_name:
        lead += " Only one evaluation was recorded."
    if not any(gauge.role == "gauge" for gauge in shown):
        lead += (
            " No judge was measured (evaluation.gauges, or held_out of the rewards): only diversity and the statistics "
            "of the pictures can show a reward that is hacked."
        )
    return section(title, table(head, rows), lead)


def _share(gauge: Gauge, change: float, before: float) -> str:
    """A change of diversity or of a statistic is read as a share of the base model's value."""
    if gauge.role not in ("spread", "statistic") or not before:
        return ""
    return f"<small>{100 * change / abs(before):+.0f} %</small>"


def _with_interval(row: Mapping[str, float], key: str) -> str:
    if key not in row:
        return "–"
    low, high = row.get(f"{key}_low", NAN), row.get(f"{key}_high", NAN)
    known = math.isfinite(low) and math.isfinite(high)
    return number(row[key]) + (f"<small>[{number(low)}, {number(high)}]</small>" if known else "")


def is_alarm(event: Mapping[str, Any]) -> bool:
    level = str(event.get("level", "")).lower()
    if level:
        return level not in ("info", "debug")
    return any(word in event_name(event).lower() for word in ALARM_WORDS)


def alarms(run: RunData) -> str:
    if not run.rows:
        return ""
    if not run.events:
        return section("Alarms and events", absent("None was recorded."))
    items = []
    for event in run.events:
        known = ("kind", "iteration", "event", "name", "message", "level")
        rest = ", ".join(
            f"{key} = {number(value) if isinstance(value, (int, float)) else value}"
            for key, value in event.items()
            if key not in known
        )
        text = " · ".join(part for part in (str(event.get("message") or ""), rest) if part)
        colour = "warn" if is_alarm(event) else ""
        where = f"iteration {event.get('iteration', '?')}"
        chip = f'<span class="chip {colour}">{escape(event_name(event))}</span>'
        items.append(f'<li>{chip}<span class="meta">{escape(where)}</span> {escape(text)}</li>')
    return section("Alarms and events", f'<div class="card"><ul class="list">{"".join(items)}</ul></div>')


def samples(run: RunData) -> str:
    title = "Samples"
    if not run.samples:
        return section(title, absent("No sample grid was saved (samples/iteration-000000.png and later)."))
    (first, first_file), (last, last_file) = run.samples[0], run.samples[-1]
    body = _shot(first_file, f"{_moment(first)}".capitalize())
    if last != first:
        body += _shot(last_file, f"After iteration {last}")
    else:
        body += absent("Only this grid was saved; there is nothing to compare it with yet.")
    body = f'<div class="grids">{body}</div>'
    credits = find_samples(run.folder / "samples", "credit-iteration")
    if credits:
        ends = credits if len(credits) < 2 else [credits[0], credits[-1]]
        shots = "".join(_shot(file, f"Credit, {_moment(iteration)}") for iteration, file in ends)
        what = "Beside each sample, what its critic's gradient says the tokens weigh: the brighter, the more."
        body += f'<p class="meta">{what}</p><div class="grids">{shots}</div>'
    prompts = run.run.get("preview_prompts")
    if isinstance(prompts, list) and prompts:
        body += details("Prompts of the grids", f"<p>{escape(' · '.join(map(str, prompts)))}</p>")
    body += _exports(run)
    between = run.samples[1:-1]
    if between:
        picked = [between[round(i * (len(between) - 1) / (MAX_STRIP - 1))] for i in range(MAX_STRIP)]
        picked = between if len(between) <= MAX_STRIP else picked
        strip = "".join(image(file, f"Iteration {iteration}") for iteration, file in picked)
        left = len(between) - len(picked)
        more = f", {left} more in samples/" if left else ""
        block = f'<div class="strip">{strip}</div>'
        body += details(f"In between: {len(picked)} grids{more}", block, inner=False)
    return section(title, body, "The same prompts and the same noise in every grid: what differs was learned.")


def _exports(run: RunData) -> str:
    """Links to the files that a generator of other things than pictures wrote beside the first and the last grid."""
    lines = []
    for iteration, grid in dict([run.samples[0], run.samples[-1]]).items():
        folder = grid.with_suffix("")
        files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
        links = [
            f'<a href="{escape(quote(file.relative_to(run.folder).as_posix()))}">{escape(file.name)}</a>'
            for file in files
        ]
        if links:
            lines.append(f"<p>{escape(_moment(iteration).capitalize())}: {' · '.join(links)}</p>")
    return details("Files of the first sample of each prompt, in samples/", "".join(lines)) if lines else ""


def _shot(grid: Path, caption: str) -> str:
    """A grid, and of videos also the film of it."""
    film = film_of(grid)
    if film is None:
        return image(grid, caption)
    if film.stat().st_size > LARGEST_FILM:
        return image(grid, f"{caption}; the film is in samples/{film.name}")
    return image(grid, f"{caption}: frames from left to right") + image(film, f"{caption}: moving")


CHARTED = ((("proxy", "gauge"), "Proxy and gauges"), (("spread",), "Spread"), (("statistic",), "Image statistics"))


def curves(run: RunData) -> str:
    title = "Rewards and gauges"
    train, evaluations, shown = run.table("train"), run.table("eval"), gauges(run)
    real = references(run)
    charts = []
    for sampler, sampler_text in SAMPLERS:
        if sum(any(name.startswith(f"{sampler}/") for name in row) for row in evaluations.values()) < 2:
            continue  # one point is no curve; the table has it
        for roles, what in CHARTED:
            picked = [gauge for gauge in shown if gauge.role in roles]
            lines = [
                over_iterations(evaluations, f"{sampler}/{gauge.name}", gauge.short, colour)
                for colour, gauge in enumerate(picked)
            ]
            charts += [_gauge_chart(f"{what}, {sampler_text}", group, picked, real) for group in by_unit(lines)]
    for colour, name in enumerate(reward_names(train)):
        charts.append(line_chart(f"Reward of the roll-outs: {name}", [_reward(train, name, colour)]))
    picked = [gauge for gauge in shown if gauge.role in ("proxy", "gauge")]
    lines = [
        against_cost(over_iterations(evaluations, f"eval/{gauge.name}", gauge.short, colour), train)
        for colour, gauge in enumerate(picked)
    ]
    charts += [
        line_chart("Against cost", group, x_label="forward-equivalents (a backward counts two)")
        for group in by_unit(lines)
    ]
    body = chart_grid(charts)
    missing = [] if evaluations else ["No evaluation was recorded."]
    if not reward_names(train):
        missing.append("No reward of the roll-outs (reward/…) was recorded.")
    body += "".join(map(absent, missing))
    lead = (
        "The proxy is what the run maximises; gauges are only logged. A proxy that rises while they fall is hacked. "
        "Bands of evaluations are 95 % intervals, bands of roll-outs one standard deviation."
    )
    return section(title, body, lead)


def _gauge_chart(title: str, lines: list[Series], picked: list[Gauge], real: Mapping[str, float]) -> str:
    names = {gauge.short: gauge.name for gauge in picked}
    if len(lines) == 1:
        title = f"{title}: {lines[0].label}"
    marks = {f"real data: {names[one.label]}": real[names[one.label]] for one in lines if names[one.label] in real}
    return line_chart(title, lines, references=marks)


def _reward(train: Mapping[int, Mapping[str, float]], name: str, colour: int) -> Series:
    one = over_iterations(train, f"reward/{name}", name, colour)
    if one.low is not None:
        return one
    widths = [train[int(number_)].get(f"reward/{name}_std", NAN) for number_ in one.x]
    if not any(math.isfinite(width) for width in widths):
        return one
    low = [y - width for y, width in zip(one.y, widths, strict=True)]
    high = [y + width for y, width in zip(one.y, widths, strict=True)]
    return Series(name, one.x, one.y, low, high, colour)
