"""Objects, counts, colours and positions that a prompt asks for, checked in the picture (GenEval, arXiv 2310.11513)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import nearest_name
from .colors import ColorNamer, ColorPrototypes
from .detection import Detection, Detector, ZeroShotDetector

RELATIONS = ("left of", "right of", "above", "below")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Clause:
    """One requirement: `count` objects of `label`, perhaps of a colour, perhaps placed against an earlier clause."""

    label: str
    count: int = 1
    color: str | None = None
    position: tuple[str, int] | None = None


class CompositionReward:
    """Whether a picture shows what `metadata[i]` specifies, in GenEval's form:

    `{"include": [{"class": "bench", "count": 1}, {"class": "dog", "count": 2, "color": "red", "position": ["left of",
    0]}], "exclude": [{"class": "dog", "count": 3}]}`

    Every clause of `include` needs at least `count` objects (1 if not given); colour and position are judged on the
    `count` most certain ones, and a position counts from the objects of the clause with that number. A clause of
    `exclude` fails with `count` objects or more. Range 0 to 1, higher is better. Two values are returned:

    * `correct`: 1 where everything holds, else 0, as GenEval scores;
    * `partial`: mean over clauses of how much of each holds: the share of objects that are there, of those the share
      with the right colour, and of pairs in the right position, averaged within the clause; for `exclude` the allowed
      number over the found. 1 exactly where `correct` is. It separates samples that all fail.

    Args:
        detector: finds objects, see `Detector`.
        colors: names the colours of objects, see `ColorNamer`.
        partial: train on `partial`, and only log `correct`; False the other way round.
        threshold: lowest score of an object; null takes what the detector returns. GenEval: 0.3 with Mask2Former.
        counting_threshold: the same for prompts with `{"tag": "counting"}`, where GenEval takes 0.9; null takes
            `threshold`.
        margin: of a position: a centre has to be off by more than this share of both objects' sizes together (0.1:
            GenEval).
        max_objects: of a label in a picture, the most certain ones.
        frames: of a video, so many evenly spaced ones are judged and averaged.
    """

    differentiable = False
    range = (0.0, 1.0)
    name = "composition"

    def __init__(
        self,
        detector: Detector | None = None,
        colors: ColorNamer | None = None,
        partial: bool = True,
        threshold: float | None = None,
        counting_threshold: float | None = None,
        margin: float = 0.1,
        max_objects: int = 16,
        frames: int = 4,
    ) -> None:
        for name, value in (("max_objects", max_objects), ("frames", frames)):
            if value < 1:
                raise ValueError(f"CompositionReward: {name} = {value} must be at least 1")
        self.detector: Detector = ZeroShotDetector() if detector is None else detector
        self.colors: ColorNamer = ColorPrototypes() if colors is None else colors
        self.partial, self.margin, self.max_objects, self.frames = partial, margin, max_objects, frames
        self.threshold = threshold
        self.counting_threshold = threshold if counting_threshold is None else counting_threshold

    def entry_weight(self, inner: str) -> float:
        """1 for the value that is trained on, 0 for the other."""
        return float(inner == ("partial" if self.partial else "correct"))

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Prepare the detector and what names colours."""
        for part in (self.detector, self.colors):
            if hasattr(part, "prepare"):
                part.prepare(device, progress=progress)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> dict[str, Tensor]:
        """`correct` and `partial`, [B] each."""
        specs = [
            read_specification(entry, prompt, getattr(self.colors, "colors", None))
            for entry, prompt in zip(metadata, prompts, strict=True)
        ]
        count = 1
        if media.dim() == 5:
            chosen = torch.linspace(0, media.shape[1] - 1, min(self.frames, media.shape[1])).round().long()
            media, count = media[:, chosen].flatten(0, 1), len(chosen)
        specs = [spec for spec in specs for _ in range(count)]
        labels = [list(dict.fromkeys(clause.label for part in spec for clause in part)) for spec in specs]
        found = self.detector.detect(media, labels)
        limits = [self._limit(entry) for entry in metadata for _ in range(count)]
        values = [
            self.judge(image, spec, self._objects(detections, limit))
            for image, spec, detections, limit in zip(media, specs, found, limits, strict=True)
        ]
        table = (
            torch.tensor(values, dtype=torch.float32, device=media.device).unflatten(0, (-1, count)).mean(1)
        )  # [B, 2]
        return {"correct": table[:, 0], "partial": table[:, 1]}

    def _limit(self, entry: Mapping[str, Any]) -> float | None:
        return self.counting_threshold if entry.get("tag") == "counting" else self.threshold

    def _objects(self, detections: Sequence[Detection], limit: float | None) -> dict[str, list[Detection]]:
        """Label -> its detections, the most certain first."""
        objects: dict[str, list[Detection]] = {}
        for one in sorted(detections, key=lambda detection: -detection.score):
            if limit is None or one.score > limit:
                objects.setdefault(one.label, []).append(one)
        return {label: found[: self.max_objects] for label, found in objects.items()}

    def judge(
        self, image: Tensor, spec: tuple[list[Clause], list[Clause]], objects: Mapping[str, Sequence[Detection]]
    ) -> tuple[float, float]:
        """(correct, partial) of one image [C, H, W] and its objects by label."""
        height, width = image.shape[-2:]
        include, exclude = spec
        groups: list[list[Detection]] = []  # objects of each clause
        matched: list[bool] = []
        scores: list[float] = []
        for clause in include:
            found = list(objects.get(clause.label, ()))[: clause.count]
            shares = [len(found) / clause.count]
            if clause.color is not None:
                names = self.colors.name([_crop(image, one.box) for one in found], [clause.label] * len(found))
                shares.append(sum(name == clause.color for name in names) / clause.count)
            if clause.position is not None:
                relation, target = clause.position
                pairs = [(one, other) for one in found for other in groups[target]]
                right = sum(relation in relations(a.box, b.box, (width, height), self.margin) for a, b in pairs)
                shares.append(right / len(pairs) if pairs else 0.0)
            groups.append(found)
            against = clause.position is None or matched[clause.position[1]]
            matched.append(all(share == 1 for share in shares) and against)
            scores.append(sum(shares) / len(shares))
        fits = []
        for clause in exclude:
            number, allowed = len(objects.get(clause.label, ())), clause.count - 1
            fits.append(number <= allowed)
            scores.append(1.0 if number <= allowed else allowed / number)
        return float(all(matched) and all(fits)), sum(scores) / len(scores)


def _crop(image: Tensor, box: Box) -> Tensor:
    """The part of an image [C, H, W] in a box, one pixel at the least."""
    height, width = image.shape[-2:]
    left, top = min(int(box[0] * width), width - 1), min(int(box[1] * height), height - 1)
    right, bottom = max(left + 1, round(box[2] * width)), max(top + 1, round(box[3] * height))
    return image[:, top:bottom, left:right]


def relations(a: Box, b: Box, size: tuple[float, float] = (1.0, 1.0), margin: float = 0.1) -> set[str]:
    """Where box a lies as seen from box b: GenEval's rule.

    The offset of the centres is shortened by `margin` of both boxes' sizes, in each direction by itself; a relation
    holds where more than half of the offset's length is left in its direction. Diagonal neighbours have two.

    Args:
        a, b: (left, top, right, bottom) as shares of the picture.
        size: (width, height) of the picture, since directions depend on its shape.
        margin: share of the sum of both boxes' widths, or heights.
    """
    offset, left = [], []
    for axis in (0, 1):
        distance = (a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) / 2 * size[axis]
        extent = (a[axis + 2] - a[axis] + b[axis + 2] - b[axis]) * size[axis]
        offset.append(distance)
        left.append(max(abs(distance) - margin * extent, 0.0) * (1 if distance > 0 else -1))
    length = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    if length == 0:
        return set()
    dx, dy = left[0] / length, left[1] / length
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, true in holds.items() if true}


def read_specification(
    metadata: Mapping[str, Any], prompt: str, colors: Sequence[str] | None = None
) -> tuple[list[Clause], list[Clause]]:
    """(include, exclude) of a prompt's metadata. Entries that are None count as absent.

    Raises:
        ValueError: neither is there, or a clause has no class, an unknown key, colour or relation, a count below 1, or
            a position that refers to no earlier clause; the prompt is named.
    """

    def wrong(problem: str) -> ValueError:
        return ValueError(f"prompt {prompt!r}: {problem}")

    found: dict[str, list[Clause]] = {}
    for part in ("include", "exclude"):
        found[part] = []
        for number, entry in enumerate(metadata.get(part) or ()):
            given = {key: value for key, value in entry.items() if value is not None}
            where = f"clause {number} of {part}"
            found[part].append(_clause(given, where, number if part == "include" else 0, colors, wrong))
    if not found["include"] and not found["exclude"]:
        raise wrong('metadata has no "include" and no "exclude"; CompositionReward takes {"include": [{"class": ...}]}')
    return found["include"], found["exclude"]


def _clause(
    given: Mapping[str, Any], where: str, earlier: int, colors: Sequence[str] | None, wrong: Callable[[str], Exception]
) -> Clause:
    for key in given:
        if key not in ("class", "count", "color", "position"):
            known = ("class", "count", "color", "position")
            raise wrong(f"{where} has the key {key!r}; {nearest_name(key, known)}")
    if not isinstance(given.get("class"), str) or not given["class"]:
        raise wrong(f'{where} has no "class", the name of an object')
    count, color, position = given.get("count", 1), given.get("color"), given.get("position")
    if not isinstance(count, int) or count < 1:
        raise wrong(f"{where} has count {count!r}; give a whole number of 1 or more")
    if color is not None and colors is not None and color not in colors:
        raise wrong(f"{where} has color {color!r}; {nearest_name(str(color), colors)}")
    if position is not None:
        if len(position) != 2 or position[0] not in RELATIONS:
            raise wrong(f"{where} has position {position!r}; it is [relation, clause], relation one of {RELATIONS}")
        if int(position[1]) not in range(earlier):
            raise wrong(f"{where} is placed against clause {position[1]}; it must be an earlier one of include")
        position = (position[0], int(position[1]))
    return Clause(given["class"], count, color, position)
