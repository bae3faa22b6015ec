"""Two evaluations on the same start states, compared episode by episode."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from genrl.envs.evaluation import Evaluation
from genrl.statistics import PairedDifference, paired_means, paired_shares

# What decides about the task; what a policy sees of it (observations, cameras ...) may differ.
TASK = ("id", "kwargs")


class ComparisonError(ValueError):
    """Two evaluations that cannot be compared; the message lists what differs."""


@dataclass(frozen=True)
class Comparison:
    """B against A on the same start states; every difference is B - A.

    Args:
        first, second: the evaluations A and B.
        success: difference of the success rates, Newcombe's 95 % interval for pairs and McNemar's exact p-value; None
            in a task without a notion of success.
        total_reward: difference of the returns, Student's paired interval and p-value; None where episodes ended at
            their success, which makes a return say when and not how well.
        both, only_first, only_second, neither: numbers of start states by who succeeded.
        length: difference of the lengths where both succeeded; None if they never did.
        notes: what a reader must know.
    """

    first: Evaluation
    second: Evaluation
    success: PairedDifference | None
    total_reward: PairedDifference | None
    both: int
    only_first: int
    only_second: int
    neither: int
    length: PairedDifference | None
    notes: tuple[str, ...] = ()

    def verdict(self) -> str:
        """One sentence about the success rates, or about the returns where there are none."""
        found, what = (
            (self.success, "succeeds more often") if self.success else (self.total_reward, "has higher returns")
        )
        if found is None or not found.p_value < 0.05:
            p = "" if found is None else f" (p = {found.p_value:.2g})"
            return f"the data do not show that one {what}{p}"
        return f"{'B' if found.difference > 0 else 'A'} {what} (p = {found.p_value:.2g})"

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of a table, the first is the heading."""
        a, b = self.first, self.second
        rows: list[tuple[str, ...]] = [
            ("", "A", "B", "B - A", "95 % interval", "p"),
            ("policy", _policy(a), _policy(b), "", "", ""),
        ]
        if self.success is not None:
            rows.append(("success", _share(a), _share(b), *_difference(self.success, 100, " %")))
        if self.total_reward is not None:
            means = [f"{e.mean('total_reward'):.4g}" for e in (a, b)]
            rows.append(("return", *means, *_difference(self.total_reward)))
        if self.length is not None:
            rows.append(("steps where both succeed", "", "", *_difference(self.length)))
        if self.success is not None:
            only = (f"only A: {self.only_first}", f"only B: {self.only_second}")
            rows.append(("start states", *only, f"both: {self.both}", f"neither: {self.neither}", ""))
        rows.append(("result", self.verdict(), "", "", "", ""))
        return rows + [("note", text, "", "", "", "") for text in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "success": None if self.success is None else asdict(self.success),
            "total_reward": None if self.total_reward is None else asdict(self.total_reward),
            "length": None if self.length is None else asdict(self.length),
            "both": self.both,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "neither": self.neither,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join("  ".join(cell for cell in row if cell) for row in self.rows())


def compare_evaluations(first: Evaluation, second: Evaluation) -> Comparison:
    """Paired comparison of two evaluations.

    Equal start states take out the luck of easy and hard ones, so that fewer episodes show a difference than two
    separate intervals need.

    Args:
        first: A. second: B.

    Raises:
        ComparisonError: different tasks, success rules, time limits or start states, or an interrupted evaluation.
    """
    differing = [
        f"env.{name}: {first.env.get(name)!r} and {second.env.get(name)!r}"
        for name in TASK
        if first.env.get(name) != second.env.get(name)
    ]
    for name in ("has_success", "success_rule", "max_steps", "stop_at_success"):
        if getattr(first, name) != getattr(second, name):
            differing.append(f"{name}: {getattr(first, name)!r} and {getattr(second, name)!r}")
    for label, evaluation in (("A", first), ("B", second)):
        if not evaluation.complete:
            differing.append(
                f"{label} was interrupted after {len(evaluation.episodes)} of {evaluation.planned} episodes"
            )
    if first.seeds != second.seeds:
        differing.append(f"start seeds: {_seeds(first)} and {_seeds(second)}")
    if differing:
        raise ComparisonError(
            f"these evaluations cannot be compared episode by episode ({'; '.join(differing)}); evaluate both with the "
            "same env, success rule, time limit, seed and episodes"
        )
    a, b = first.episodes, second.episodes
    pairs = list(zip(a, b, strict=True))
    won = [(x, y) for x, y in pairs if x.success and y.success]
    lengths = [[float(e.length) for e in side] for side in zip(*won, strict=True)]
    return Comparison(
        first=first,
        second=second,
        success=paired_shares([bool(e.success) for e in a], [bool(e.success) for e in b])
        if first.has_success
        else None,
        total_reward=None
        if first.stop_at_success and (first.successes or second.successes)
        else paired_means([e.total_reward for e in a], [e.total_reward for e in b]),
        both=len(won),
        only_first=sum(x.success and not y.success for x, y in pairs),
        only_second=sum(y.success and not x.success for x, y in pairs),
        neither=sum(not x.success and not y.success for x, y in pairs),
        length=paired_means(*lengths) if won else None,
        notes=_notes(first, second),
    )


def _notes(first: Evaluation, second: Evaluation) -> tuple[str, ...]:
    notes = []
    moved = sum(x.start != y.start for x, y in zip(first.episodes, second.episodes, strict=True))
    if moved and first.env.get("observations") == second.env.get("observations"):
        notes.append(
            f"{moved} first observations differ although the seeds are equal: the simulators or their settings differ"
        )
    versions = [
        f"{name} {first.versions.get(name)} and {second.versions.get(name)}"
        for name in sorted({*first.versions, *second.versions})
        if first.versions.get(name) != second.versions.get(name)
    ]
    if versions:
        notes.append(f"versions differ: {', '.join(versions)}")
    print_a, print_b = first.policy.get("fingerprint"), second.policy.get("fingerprint")
    if print_a is not None and print_a == print_b:
        notes.append("A and B have the same weights")
    return tuple(notes)


def _seeds(evaluation: Evaluation) -> str:
    seeds = evaluation.seeds
    return f"{len(seeds)} from {seeds[0]}" if seeds else "none"


def _policy(evaluation: Evaluation) -> str:
    return f"{evaluation.policy.get('class', '?')} ({evaluation.policy.get('weights', '?')})"


def _share(evaluation: Evaluation) -> str:
    return f"{100 * evaluation.success_rate:.1f} % ({evaluation.successes} of {len(evaluation.episodes)})"


def _difference(found: PairedDifference, scale: float = 1, unit: str = "") -> tuple[str, str, str]:
    if found.low != found.low:  # one pair has no interval
        return f"{scale * found.difference:+.4g}{unit}", "-", "-"
    interval = f"{scale * found.low:+.4g} to {scale * found.high:+.4g}{unit}"
    return f"{scale * found.difference:+.4g}{unit}", interval, f"{found.p_value:.2g}"
