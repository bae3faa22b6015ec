"""What an evaluation has measured: one record per start state, and the numbers that follow from them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from genrl.envs.latency import Latency
from genrl.statistics import paired_means, wilson_interval

FORMAT = 1  # of the file


class EvaluationFileError(ValueError):
    """A file that is no evaluation, or of a newer format."""


@dataclass(frozen=True)
class Consistency:
    """STAC of one episode, see `genrl.envs.stac`.

    Args:
        scores: S_t at every replanning step but the first; empty for an episode that ended before the second.
        threshold: of the alarm for this episode; None while nothing is calibrated (too few successful episodes).
        alarm_step: environment step at which a score first exceeded the threshold, None without an alarm.
    """

    scores: tuple[float, ...]
    threshold: float | None = None
    alarm_step: int | None = None

    @property
    def score(self) -> float | None:
        """The episode's score: its largest S_t, None without one."""
        return max(self.scores) if self.scores else None


@dataclass(frozen=True)
class EpisodeResult:
    """One episode.

    Args:
        episode: number, from 0. seed: of the reset, which determines the start state.
        success: under the evaluation's rule; None in a task without a notion of success.
        success_step: first step whose flag said success, None without one.
        total_reward: sum of the rewards until the end. length: steps until the end.
        ended: ``"success"`` (stopped, as success was certain), ``"terminated"`` (by the task), ``"truncated"`` (time).
        start: fingerprint of the first observation.
        stac: temporal consistency, if it was measured.
    """

    episode: int
    seed: int
    success: bool | None
    success_step: int | None
    total_reward: float
    length: int
    ended: str
    start: str
    stac: Consistency | None = None


@dataclass(frozen=True)
class Evaluation:
    """Success of a policy on listed start states.

    Args:
        env: settings of the environment. success_rule: how flags become success. max_steps: time limit.
        has_success: whether the task has a notion of success; without one only returns are measured.
        stop_at_success: whether an episode ended as soon as its success was certain; rewards and lengths then count
            until there.
        seed: episode i started from ``reset(seed=seed + i)``. planned: number of episodes that were asked for.
        policy: what acted: class, weights (``"ema"``, ``"raw"`` ...), fingerprint of the weights, nfe (network calls
            per chunk), chunking, seed of its noise.
        versions: of everything that decides about the numbers.
        episodes: in the order of their seeds. With fewer than `planned` the evaluation was interrupted, and short
            episodes are over-represented.
        stac: settings and detection metrics of the consistency alarm.
        videos: names of files beside which start states they show.
        warnings: what a reader must know.
        latency, timing: time measurements, which differ from run to run; they have a file of their own.
    """

    env: Mapping[str, Any]
    success_rule: str
    max_steps: int
    stop_at_success: bool
    seed: int
    planned: int
    policy: Mapping[str, Any]
    versions: Mapping[str, str]
    episodes: tuple[EpisodeResult, ...]
    has_success: bool = True
    stac: Mapping[str, Any] | None = None
    videos: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    latency: Latency | None = field(default=None, compare=False)
    timing: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def complete(self) -> bool:
        """Every planned episode was measured."""
        return len(self.episodes) == self.planned

    @property
    def successes(self) -> int:
        """Number of successful episodes."""
        return sum(bool(episode.success) for episode in self.episodes)

    @property
    def success_rate(self) -> float:
        """Share of successful episodes; NaN without episodes, and in a task without a notion of success."""
        return self.successes / len(self.episodes) if self.episodes and self.has_success else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate."""
        share = self.success_rate
        return (math.nan, math.nan) if math.isnan(share) else wilson_interval(share, len(self.episodes))

    @property
    def distinct_starts(self) -> int:
        """Number of different first observations."""
        return len({episode.start for episode in self.episodes})

    @property
    def seeds(self) -> list[int]:
        """Start seeds, one per episode."""
        return [episode.seed for episode in self.episodes]

    def mean(self, name: str) -> float:
        """Mean over episodes of ``"total_reward"`` or ``"length"``."""
        values = [float(getattr(episode, name)) for episode in self.episodes]
        return math.fsum(values) / len(values) if values else math.nan

    def summary(self) -> dict[str, Any]:
        """The numbers of the table as plain values; they follow from the episodes."""
        low, high = self.interval
        rewards = [episode.total_reward for episode in self.episodes]
        spread = paired_means([0.0] * len(rewards), rewards) if rewards else None  # Student's interval of the mean
        return _finite(
            {
                "episodes": len(self.episodes),
                "complete": self.complete,
                "successes": self.successes if self.has_success else None,
                "success_rate": self.success_rate,
                "success_low": low,
                "success_high": high,
                "total_reward": self.mean("total_reward"),
                "total_reward_low": spread.low if spread else math.nan,
                "total_reward_high": spread.high if spread else math.nan,
                "length": self.mean("length"),
                "distinct_starts": self.distinct_starts,
            }
        )

    def table(self) -> list[tuple[str, str]]:
        """(what, value) rows for people."""
        numbers = self.summary()
        n, policy = len(self.episodes), self.policy
        until = " until success or end" if self.stop_at_success and self.has_success else ""
        rows = [
            ("environment", f"{self.env['id']}, at most {self.max_steps} steps"),
            ("policy", f"{policy.get('class', '?')}, weights: {policy.get('weights', '?')}"),
        ]
        if self.has_success:
            low, high = (_percent(numbers[name]) for name in ("success_low", "success_high"))
            counts = f"{self.successes} of {n}"
            rows.append(("success", f"{_percent(numbers['success_rate'])} ({counts}), 95 % interval {low} to {high}"))
            rows.append(("success rule", self.success_rule))
        total = [numbers[f"total_reward{end}"] for end in ("", "_low", "_high")]
        rows += [
            ("start seeds", f"{_seeds(self.seeds)}, {self.distinct_starts} different starts"),
            (f"return{until}", _number(*total)),
            (f"length{until}", _number(numbers["length"])),
        ]
        if policy.get("nfe") is not None:
            rows.append(("network calls per chunk", str(policy["nfe"])))
        if self.latency is not None:
            rows.append(("time of one act()", str(self.latency)))
        if self.stac is not None:
            rows.append(("consistency alarm", _alarm(self.stac)))
        if not self.complete:
            rows.append(("interrupted", f"{n} of {self.planned} episodes; short ones are over-represented"))
        rows += [("video", name) for name in self.videos]
        return rows + [("warning", text) for text in self.warnings]

    def __str__(self) -> str:
        return "\n".join(f"{what}: {value}" for what, value in self.table())

    def to_dict(self) -> dict[str, Any]:
        """JSON values of everything that does not depend on the clock."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("latency", "timing")}
        values["episodes"] = [_plain(asdict(episode)) for episode in self.episodes]
        return {"format": FORMAT, "summary": self.summary()} | _plain(values)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``NAME.json`` and, with the time measurements, ``NAME.timing.json``, each completely or not at all.

        The first file is the same, byte for byte, whenever the same policy is evaluated on the same start states by the
        same versions, with any number of parallel environments.

        Returns:
            The path of the first.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        latency = None if self.latency is None else asdict(self.latency)
        write_json(timing_path(path), {"latency": latency, **self.timing})
        write_json(path, self.to_dict())
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read what `save` wrote; without the second file `latency` is None.

        Raises:
            FileNotFoundError: no such file.
            EvaluationFileError: it is no evaluation, or of a newer format.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no evaluation {path}; `genrl evaluate` writes one")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values.pop("format")
            values.pop("summary")
            if found > FORMAT:
                raise EvaluationFileError(
                    f"{path} has format {found}; this version reads up to {FORMAT}. Update genrl, or evaluate again"
                )
            episodes = [_episode(value) for value in values.pop("episodes")]
            values |= {name: tuple(values[name]) for name in ("videos", "warnings")}
            timing = json.loads(timing_path(path).read_text()) if timing_path(path).is_file() else {}
            latency = timing.pop("latency", None)
            return cls(
                **values,
                episodes=tuple(episodes),
                latency=None if latency is None else Latency(**latency),
                timing=timing,
            )
        except EvaluationFileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EvaluationFileError(f"{path} is not an evaluation written by genrl ({error!r})") from error


def timing_path(path: Path) -> Path:
    """Where the time measurements of an evaluation file are."""
    return path.with_name(f"{path.stem}.timing.json")


def write_json(path: Path, values: Any) -> None:
    """Write JSON so that a reader finds the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _episode(values: dict[str, Any]) -> EpisodeResult:
    stac = values.pop("stac")
    if stac is not None:
        stac = Consistency(**{**stac, "scores": tuple(stac["scores"])})
    return EpisodeResult(**values, stac=stac)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity, which JSON does not have, become None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _seeds(seeds: Sequence[int]) -> str:
    whole = bool(seeds) and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if whole else f"{len(seeds)} of {min(seeds)} to {max(seeds)}" if seeds else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, low: float | None = None, high: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" + (f", 95 % interval {low:.4g} to {high:.4g}" if low is not None and high is not None else "")


def _alarm(stac: Mapping[str, Any]) -> str:
    metrics = stac["metrics"]
    if metrics is None:
        return "no episode was replanned twice: nothing to score"

    def shown(name: str) -> str:
        return "-" if metrics[name] is None else f"{metrics[name]:.2f}"

    if not stac["calibrated_episodes"]:
        needed = math.ceil(1 / stac["settings"]["alpha"] - 1e-9) - 1
        return f"not calibrated: that takes {needed} other successful episodes; AUROC of the scores {shown('auroc')}"
    return (
        f"detects {shown('tpr')} of {metrics['failures']} failures, silent in {shown('tnr')} of {metrics['successes']} "
        f"successes, AUROC {shown('auroc')}"
    )
