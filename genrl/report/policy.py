"""The parts of a report that only runs of policies have: success, videos, episodes."""

from __future__ import annotations

import base64
import json
import math
from html import escape
from pathlib import Path
from typing import Any

from genrl.report.charts import line_chart, number
from genrl.report.data import NAN, RunData
from genrl.report.page import absent, chart_grid, details, duration, pairs, section, table
from genrl.report.sections import tile, tiles, wall_seconds
from genrl.report.views import over_iterations

MEASURED = (
    ("eval/success", "success rate"),
    ("eval/return", "return"),
    ("eval/episode_length", "episode length"),
    ("eval/held_out_loss", "loss on held-out demonstrations"),
    ("eval/held_out_action_mse", "squared error of held-out actions"),
)
LARGEST_VIDEO = 8 * 2**20  # bytes; a larger one is named instead of embedded


def policy_tiles(run: RunData) -> str:
    """Success of the last and of the best evaluation, cost and time."""
    rows = run.table("eval")
    measured = {i: row for i, row in rows.items() if "eval/success" in row}
    found = []
    if measured:
        last = next(reversed(measured))
        low, high = measured[last].get("eval/success_low", NAN), measured[last].get("eval/success_high", NAN)
        bounds = f"95 %: {_percent(low)} to {_percent(high)}"
        found.append(tile("success, last weights", _percent(measured[last]["eval/success"]), bounds))
        best = max(measured, key=lambda i: measured[i]["eval/success"])
        if best != last:
            chosen = f"iteration {best}, chosen on these starts"
            found.append(tile("success, best weights", _percent(measured[best]["eval/success"]), chosen))
    elif rows:
        last = next(reversed(rows))
        found.append(tile("held-out loss", number(rows[last].get("eval/held_out_loss", NAN)), f"iteration {last}"))
    calls = _sizes(run).get("network_calls_per_action_chunk")
    if calls is not None:
        found.append(tile("network calls per chunk", str(calls), f"{_sizes(run).get('executed_actions')} actions each"))
    if _sizes(run).get("demonstrations") is not None:
        steps = f"{_sizes(run).get('transitions')} steps"
        found.append(tile("demonstrations", str(_sizes(run)["demonstrations"]), steps))
    if math.isfinite(wall_seconds(run)):
        found.append(tile("wall time", duration(wall_seconds(run)), "training and evaluation"))
    return tiles(found)


def evaluations(run: RunData) -> str:
    """Every evaluation with its interval, and curves of them."""
    title = "Evaluations"
    rows = run.table("eval")
    if not rows:
        return section(title, absent("No evaluation was recorded."))
    names = [(key, label) for key, label in MEASURED if any(key in row for row in rows.values())]
    lines: list[list[str] | str] = []
    for iteration, row in rows.items():
        lines.append([_moment(iteration), *(_cell(row, key) for key, _ in names)])
    charts = [line_chart(label.capitalize(), [over_iterations(rows, key, label)]) for key, label in names]
    lead = (
        "In brackets 95 % intervals. These start states also choose the best checkpoint, so its success here is "
        "optimistic; genrl evaluate measures it on others."
    )
    body = table(["", *(label for _, label in names)], lines)
    return section(title, body + (chart_grid(charts) if len(rows) > 2 else ""), lead)


def videos(run: RunData) -> str:
    """Films of the last evaluation that was filmed."""
    title = "Videos"
    folders = sorted(path for path in (run.folder / "videos").glob("iteration-*") if any(path.glob("*.mp4")))
    if not folders:
        return section(title, absent("No episode was filmed (evaluation.videos, with an environment)."))
    shown = "".join(video(file) for file in sorted(folders[-1].glob("*.mp4")))
    iteration = int(folders[-1].name.removeprefix("iteration-"))
    return section(title, f'<div class="grids">{shown}</div>', f"Weights of iteration {iteration}.")


def video(file: Path) -> str:
    """An mp4 file inside the page, with its name as caption."""
    caption = escape(file.stem.replace("-", " "))
    data = file.read_bytes()
    if len(data) > LARGEST_VIDEO:
        named = absent(f"{file} is too large to embed.")
        return f'<figure class="shot"><figcaption>{caption}</figcaption>{named}</figure>'
    source = f"data:video/mp4;base64,{base64.b64encode(data).decode('ascii')}"
    return (
        f'<figure class="shot"><figcaption>{caption}</figcaption>'
        f'<video controls loop muted playsinline preload="auto" src="{source}"></video></figure>'
    )


def episodes(run: RunData) -> str:
    """Start states, outcomes and versions of the last evaluation."""
    files = sorted((run.folder / "evaluations").glob("iteration-??????.json"))
    if not files:
        return ""
    try:
        found = json.loads(files[-1].read_text(encoding="utf-8"))
        timing_file = files[-1].with_name(f"{files[-1].stem}.timing.json")
        timing = json.loads(timing_file.read_text(encoding="utf-8")) if timing_file.is_file() else {}
    except json.JSONDecodeError:
        return section("Last evaluation", absent(f"{files[-1].name} is damaged."))
    facts = [
        ("environment", str(found["env"]["id"])),
        ("success rule", str(found["success_rule"])),
        ("weights", str(found["policy"].get("weights"))),
        ("different start states", f"{found['summary']['distinct_starts']} of {found['summary']['episodes']}"),
        *_latency(timing.get("latency")),
        *((f"version of {name}", str(version)) for name, version in found["versions"].items()),
    ]
    rows = [
        [
            str(episode["seed"]),
            "yes" if episode["success"] else "no",
            "–" if episode["success_step"] is None else str(episode["success_step"]),
            str(episode["length"]),
            number(episode["total_reward"]),
        ]
        for episode in found["episodes"]
    ]
    listed = table(["start seed", "success", "at step", "length", "return"], rows)
    body = f'<div class="card">{pairs(facts)}</div>' + details(f"Episodes ({len(rows)})", listed)
    return section("Last evaluation", body)


def _latency(latency: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not latency:
        return []
    shown = [f"{name} {value:.3g}" for name, value in latency.items() if isinstance(value, (int, float))]
    return [("time of one act()", ", ".join(shown))]


def _sizes(run: RunData) -> dict[str, Any]:
    sizes = run.run.get("sizes")
    return sizes if isinstance(sizes, dict) else {}


def _cell(row: dict[str, float], key: str) -> str:
    if key not in row:
        return "–"
    value, low, high = row[key], row.get(f"{key}_low", NAN), row.get(f"{key}_high", NAN)
    show = _percent if key == "eval/success" else number
    known = math.isfinite(low) and math.isfinite(high)
    return show(value) + (f"<small>[{show(low)}, {show(high)}]</small>" if known else "")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if math.isfinite(value) else "–"


def _moment(iteration: int) -> str:
    return "before training" if iteration == 0 else f"iteration {iteration}"
