"""The part of a report that goes prompt by prompt: which are drawn well, which badly, which changed most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from genrl.report.charts import number
from genrl.report.data import NAN, PROMPT_REWARDS, RunData, as_float, scan_metrics
from genrl.report.page import absent, section, table

SHOWN = 5  # prompts at each end
LONGEST = 140  # characters of a prompt


@dataclass(frozen=True)
class PromptHistory:
    """Mean rewards of one prompt, as (iteration, reward), ascending."""

    text: str
    rewards: list[tuple[int, float]]

    @property
    def first(self) -> float:
        return self.rewards[0][1]

    @property
    def last(self) -> float:
        return self.rewards[-1][1]

    @property
    def gain(self) -> float:
        return self.last - self.first


def prompt_histories(folder: Path, kind: str) -> list[PromptHistory]:
    """Rewards by prompt of a run directory, `"eval"` (held out) or `"train"`; without a score left out."""
    texts: dict[int, str] = {}
    found: dict[int, dict[int, float]] = {}
    for row in scan_metrics(folder / PROMPT_REWARDS)[0]:
        if row.get("kind") != kind or not isinstance(row.get("iteration"), int):
            continue
        texts |= {int(place): str(text) for place, text in (row.get("text") or {}).items()}
        for place, reward in zip(row.get("prompt") or [], row.get("reward") or [], strict=False):
            if math.isfinite(value := as_float(NAN if reward is None else reward)):
                found.setdefault(int(place), {})[row["iteration"]] = value
    return [
        PromptHistory(texts.get(place, f"prompt {place}"), sorted(rewards.items()))
        for place, rewards in sorted(found.items())
    ]


def prompts(run: RunData) -> str:
    """The best and the worst held-out prompts, and those that gained and lost most."""
    title = "Prompts"
    held_out = prompt_histories(run.folder, "eval")
    if not held_out:
        return section(title, absent(f"No reward of single prompts was recorded ({PROMPT_REWARDS})."))
    rows: list[list[str] | str] = []
    by_last = sorted(held_out, key=lambda history: history.last)
    if len(by_last) <= 2 * SHOWN:
        rows += ["All, from the worst to the best", *map(_row, by_last)]
    else:
        rows += ["The worst", *map(_row, by_last[:SHOWN]), "The best", *map(_row, by_last[: -SHOWN - 1 : -1])]
        by_gain = sorted((h for h in held_out if len(h.rewards) > 1), key=lambda history: history.gain)
        losses = [history for history in by_gain[:SHOWN] if history.gain < 0]
        gains = [history for history in by_gain[: -SHOWN - 1 : -1] if history.gain > 0]
        for what, histories in (("Gained most", gains), ("Lost most", losses)):
            rows += [what, *map(_row, histories)] if histories else []
    fell = sum(history.gain < 0 for history in held_out)
    lead = f"Mean reward of each of {len(held_out)} held-out prompts; {fell} of them read less than at the start."
    return section(title, table(["", "first", "last", "change"], rows) + _trained(run), lead)


def _trained(run: RunData) -> str:
    """Prompts that are always drawn badly teach little; a group of equal rewards teaches nothing."""
    seen = [history for history in prompt_histories(run.folder, "train") if len(history.rewards) > 1]
    if len(seen) < 2 * SHOWN:
        return ""
    worst = sorted(seen, key=lambda history: history.last)[:SHOWN]
    rows: list[list[str] | str] = [f"The worst of {len(seen)} that were trained on more than once", *map(_row, worst)]
    return table(["", "first", "last", "change"], rows)


def _row(history: PromptHistory) -> list[str]:
    text = history.text if len(history.text) <= LONGEST else history.text[: LONGEST - 1] + "…"
    change = f"{'+' if history.gain > 0 else ''}{number(history.gain)}" if len(history.rewards) > 1 else "–"
    return [escape(text), number(history.first), number(history.last), change]
