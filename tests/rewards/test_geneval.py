"""The compositional checker against scenes whose objects are known, with a detector that reads real pixels."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import ImageColor
from scipy import ndimage

from genrl.rewards import (
    CLIPColors,
    ColorPrototypes,
    Compose,
    CompositionReward,
    Detection,
    ZeroShotDetector,
    check_reward,
    score,
)
from genrl.rewards.detection import intersection_over_union, without_duplicates
from genrl.rewards.geneval import RELATIONS, read_specification, relations

HEIGHT, WIDTH = 48, 72
FRAMES = {
    "bench": (1.0, 0.0, 1.0),
    "dog": (0.0, 1.0, 1.0),
    "clock": (0.9, 0.9, 0.2),
}  # a class is the colour of a frame
FILLS = {"red": (0.86, 0.1, 0.1), "green": (0.15, 0.62, 0.2), "blue": (0.1, 0.3, 0.86)}
GREY = 0.5


class FrameDetector:
    """Finds framed rectangles on grey; larger ones are more certain."""

    def detect(self, media, labels):
        found = []
        for image, names in zip(media.numpy(), labels, strict=True):
            regions, _ = ndimage.label(np.abs(image - GREY).max(0) > 0.05)
            detections = []
            for rows, columns in ndimage.find_objects(regions):
                corner = image[:, rows.start, columns.start]
                label = min(FRAMES, key=lambda name: np.abs(corner - FRAMES[name]).sum())
                box = (columns.start / WIDTH, rows.start / HEIGHT, columns.stop / WIDTH, rows.stop / HEIGHT)
                area = (rows.stop - rows.start) * (columns.stop - columns.start)
                detections.append(Detection(label, box, area / (WIDTH * HEIGHT)))
            found.append([one for one in detections if one.label in names])
        return found


def draw(objects):
    """Image [3, H, W] of (label, colour, left, top, width, height) in pixels."""
    image = torch.full((3, HEIGHT, WIDTH), GREY)
    for label, color, x, y, w, h in objects:
        image[:, y : y + h, x : x + w] = torch.tensor(FRAMES[label])[:, None, None]
        image[:, y + 1 : y + h - 1, x + 1 : x + w - 1] = torch.tensor(FILLS[color])[:, None, None]
    return image


def scene(rng, count):
    """Rectangles that do not touch, of different areas."""
    objects = []
    while len(objects) < count:
        w, h = rng.randint(8, 20), rng.randint(8, 16)
        x, y = rng.randint(0, WIDTH - w), rng.randint(0, HEIGHT - h)
        apart = all(x > a + c or a > x + w or y > b + d or b > y + h for _, _, a, b, c, d in objects)
        if apart and w * h not in {c * d for *_, c, d in objects}:
            objects.append((rng.choice(list(FRAMES)), rng.choice(list(FILLS)), x, y, w, h))
    return objects


def specification(rng):
    include = []
    for i in range(rng.randint(1, 3)):
        clause = {"class": rng.choice(list(FRAMES)), "count": rng.randint(1, 2)}
        if rng.random() < 0.5:
            clause["color"] = rng.choice(list(FILLS))
        if i and rng.random() < 0.6:
            clause["position"] = [rng.choice(RELATIONS), rng.randrange(i)]
        include.append(clause)
    exclude = [{"class": rng.choice(list(FRAMES)), "count": rng.randint(1, 3)}] if rng.random() < 0.5 else []
    return {"include": include, "exclude": exclude}


def pixel_relations(a, b):
    """GenEval's rule in pixels, on objects as they were drawn."""
    centre_a, centre_b = np.array([a[2] + a[4] / 2, a[3] + a[5] / 2]), np.array([b[2] + b[4] / 2, b[3] + b[5] / 2])
    offset = centre_a - centre_b
    sizes = np.array([a[4] + b[4], a[5] + b[5]])
    revised = np.maximum(np.abs(offset) - 0.1 * sizes, 0) * np.sign(offset)
    if np.all(np.abs(revised) < 1e-9):
        return set()
    dx, dy = revised / np.linalg.norm(offset)
    found = [("left of", dx < -0.5), ("right of", dx > 0.5), ("above", dy < -0.5), ("below", dy > 0.5)]
    return {name for name, true in found if true}


def correct_by_hand(spec, objects):
    by_class = {}
    for one in sorted(objects, key=lambda o: -o[4] * o[5]):
        by_class.setdefault(one[0], []).append(one)
    groups, fine = [], True
    for clause in spec["include"]:
        chosen = by_class.get(clause["class"], [])[: clause["count"]]
        good = len(chosen) == clause["count"]
        if good and "color" in clause:
            good = all(one[1] == clause["color"] for one in chosen)
        if good and "position" in clause:
            relation, target = clause["position"]
            others = groups[target]
            good = others is not None and all(relation in pixel_relations(a, b) for a in chosen for b in others)
        groups.append(chosen if good else None)
        fine = fine and good
    return fine and all(len(by_class.get(c["class"], [])) < c["count"] for c in spec["exclude"])


def test_correctness_equals_the_rule_on_the_objects_that_were_drawn():
    rng = random.Random(0)
    scenes = [scene(rng, rng.randint(1, 5)) for _ in range(400)]
    specs = [specification(rng) for _ in scenes]
    media = torch.stack([draw(objects) for objects in scenes])
    found = CompositionReward(FrameDetector())(media, ["p"] * 400, specs)
    expected = [correct_by_hand(spec, objects) for spec, objects in zip(specs, scenes, strict=True)]
    assert found["correct"].tolist() == [float(value) for value in expected]
    assert 20 < sum(expected) < 380
    assert torch.equal(found["partial"] == 1, found["correct"] == 1)
    assert found["partial"].min() >= 0 and found["partial"].unique().numel() > 10


def partial(spec, objects, **arguments):
    media = draw(objects)[None]
    return CompositionReward(FrameDetector(), **arguments)(media, ["p"], [spec])["partial"].item()


RED, GREEN = ("dog", "red", 2, 2, 12, 12), ("dog", "green", 40, 2, 11, 11)


@pytest.mark.parametrize(
    ("spec", "objects", "expected"),
    [
        ({"include": [{"class": "dog", "count": 4}]}, [RED, GREEN], 2 / 4),
        ({"include": [{"class": "dog", "count": 2, "color": "red"}]}, [RED, GREEN], (1 + 1 / 2) / 2),
        ({"include": [{"class": "dog", "color": "green"}]}, [RED, GREEN], 1 / 2),  # the most certain one is red
        ({"include": [{"class": "dog"}, {"class": "bench"}]}, [RED], 1 / 2),
        ({"exclude": [{"class": "dog", "count": 2}]}, [RED, GREEN], 1 / 2),
        ({"exclude": [{"class": "dog"}]}, [RED], 0.0),
        ({"include": [{"class": "dog"}], "exclude": [{"class": "dog", "count": 2}]}, [RED], 1.0),
        (
            {"include": [{"class": "bench"}, {"class": "dog", "count": 2, "position": ["left of", 0]}]},
            [RED, GREEN, ("bench", "blue", 25, 2, 10, 10)],
            (1 + (1 + 1 / 2) / 2) / 2,
        ),
        ({"include": [{"class": "bench"}, {"class": "dog", "position": ["above", 0]}]}, [RED], (0 + (1 + 0) / 2) / 2),
    ],
)
def test_partial_credit_is_what_one_counts_by_hand(spec, objects, expected):
    assert partial(spec, objects) == pytest.approx(expected)


def test_directions_depend_on_the_shape_of_the_picture():
    a, b = (0.0, 0.0, 0.1, 0.1), (0.5, 0.5, 0.6, 0.6)
    assert relations(a, b) == {"left of", "above"}
    assert relations(a, b, size=(4, 1)) == {"left of"} and relations(a, b, size=(1, 4)) == {"above"}
    assert relations(a, a) == set() and relations((0, 0, 1, 1), (0.05, 0, 1, 1)) == set()  # within the margin
    assert relations((0, 0, 1, 1), (0.05, 0, 1, 1), margin=0.0) == {"left of"}


def test_certain_objects_only_and_more_certain_ones_for_counting():
    spec = {"include": [{"class": "dog", "count": 2}]}
    objects = [("dog", "red", 2, 2, 20, 16), ("dog", "red", 40, 2, 9, 9)]
    small, large = 81 / (WIDTH * HEIGHT), 320 / (WIDTH * HEIGHT)
    between = (small + large) / 2
    assert partial(spec, objects) == 1.0 and partial(spec, objects, threshold=between) == 0.5
    assert partial(spec, objects, counting_threshold=between) == 1.0
    assert partial({**spec, "tag": "counting"}, objects, counting_threshold=between) == 0.5
    assert partial(spec, objects, max_objects=1) == 0.5


def test_either_value_is_trained_on_and_the_other_is_logged():
    media, spec = draw([RED])[None], {"include": [{"class": "dog", "count": 2}]}
    for kind, value in ((True, "partial"), (False, "correct")):
        compose = Compose({"geneval": CompositionReward(FrameDetector(), partial=kind)}, weights={"geneval": 2.0})
        raw = score(compose, media, ["p"], [spec])
        assert set(raw) == {"geneval/correct", "geneval/partial"}
        assert compose.for_advantage(raw)[1] == {f"geneval/{value}": 2.0}


def test_a_video_is_the_mean_of_its_frames():
    spec = {"include": [{"class": "dog"}]}
    video = torch.stack([draw([RED]), draw([]), draw([]), draw([RED])])[None]
    found = CompositionReward(FrameDetector())(video, ["p"], [spec])
    assert found["correct"].tolist() == [0.5]
    assert CompositionReward(FrameDetector(), frames=1)(video, ["p"], [spec])["correct"].tolist() == [1.0]


def test_the_checker_itself_finds_nothing_wrong():
    media = torch.stack([draw([RED]), draw([RED, GREEN])])
    metadata = [{"include": [{"class": "dog", "count": 2, "color": "red"}]}] * 2
    assert check_reward(CompositionReward(FrameDetector()), media, ["a", "b"], metadata) == []


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, 'has no "include" and no "exclude"'),
        ({"include": [{"count": 1}]}, 'clause 0 of include has no "class"'),
        ({"include": [{"class": "a", "colour": "red"}]}, r"has the key 'colour'; did you mean 'color'\?"),
        ({"include": [{"class": "a", "color": "rde"}]}, r"has color 'rde'; did you mean 'red'\?"),
        ({"include": [{"class": "a", "count": 0}]}, "has count 0"),
        ({"include": [{"class": "a", "position": ["near", 0]}]}, "relation one of"),
        ({"include": [{"class": "a", "position": ["above", 0]}]}, "placed against clause 0; it must be an earlier one"),
    ],
)
def test_a_specification_that_cannot_be_read_names_the_prompt(metadata, message):
    with pytest.raises(ValueError, match=rf"prompt 'two cats': .*{message}"):
        read_specification(metadata, "two cats", ("red", "green"))


def test_entries_that_are_none_count_as_absent():
    """As a table with a column for every key has them."""
    (clause,), exclude = read_specification(
        {"include": [{"class": "cat", "count": None, "color": None, "position": None}], "exclude": None}, "p"
    )
    assert (clause.label, clause.count, clause.color, clause.position, exclude) == ("cat", 1, None, None, [])


# --------------------------------------------------------------------------------------------------------- colours

SHADES = {
    "red": ["red", "crimson", "firebrick", "darkred"], "orange": ["orange", "darkorange"],
    "yellow": ["yellow", "gold", "khaki"], "green": ["green", "lime", "forestgreen", "darkgreen", "limegreen"],
    "blue": ["blue", "navy", "royalblue", "dodgerblue", "skyblue", "midnightblue", "steelblue"],
    "purple": ["purple", "indigo", "darkviolet"],
    "pink": ["pink", "hotpink", "deeppink", "lightpink"], "brown": ["brown", "saddlebrown", "sienna"],
    "black": ["black"], "white": ["white", "snow", "ghostwhite"], "gray": ["gray", "darkgray", "dimgray"],
}  # fmt: skip


def test_named_colours_of_the_web_are_named():
    namer, wrong, total = ColorPrototypes(), [], 0
    for name, shades in SHADES.items():
        for shade in shades:
            crop = torch.tensor(ImageColor.getrgb(shade))[:, None, None].expand(3, 5, 5) / 255
            found = namer.name([crop], ["x"])[0]
            total += 1
            wrong += [(shade, found)] if found != name else []
    assert len(wrong) <= 1, wrong  # CSS calls (165, 42, 42) brown, which is about as red
    assert total > 30


def test_the_middle_of_a_box_decides():
    crop = torch.full((3, 10, 10), 1.0)
    crop[:, 2:8, 2:8] = torch.tensor(FILLS["blue"])[:, None, None]
    assert ColorPrototypes().name([crop], ["x"]) == ["blue"]
    assert ColorPrototypes(middle=1.0).name([crop], ["x"]) == ["white"]
    assert ColorPrototypes().name([torch.zeros(1, 1, 1)], ["x"]) == ["black"]  # grey pictures, single pixels


def test_clip_names_one_of_the_colours(tmp_path):
    pytest.importorskip("transformers")
    namer = CLIPColors(**CLIPColors.tiny_arguments({}, tmp_path))
    crops = [torch.rand(3, 9, 14, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    found = namer.name(crops, ["cat", "dog"])
    assert all(name in namer.colors for name in found)
    # By hand: cosine to the mean of the three descriptions.
    image = namer.encoder.images(crops[0][None])[0]
    best = []
    for color in namer.colors:
        texts = [f"a photo of a {color} cat", f"a photo of a {color}-colored cat", f"a photo of a {color} object"]
        mean = namer.encoder.texts(texts).mean(0)
        best.append((mean @ image / mean.norm()).item())
    assert found[0] == namer.colors[int(np.argmax(best))]


# -------------------------------------------------------------------------------------------------------- detectors


def test_boxes_that_overlap_are_one_object():
    boxes = [(0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.5, 0.4), (0.5, 0.5, 1.0, 1.0)]
    assert intersection_over_union(boxes[0], boxes[1]) == pytest.approx(0.8)
    assert intersection_over_union(boxes[0], boxes[2]) == intersection_over_union((0, 0, 0, 0), (0, 0, 0, 0)) == 0.0
    found = [Detection("a", box, value) for box, value in zip(boxes, (0.5, 0.9, 0.1), strict=True)]
    other = Detection("b", boxes[0], 0.3)
    assert without_duplicates([*found, other], 0.5) == [found[1], other, found[2]]
    assert without_duplicates(found, 0.9) == [found[1], found[0], found[2]]


def test_a_zero_shot_detector_gives_labels_and_boxes_of_the_picture(tmp_path):
    transformers = pytest.importorskip("transformers")
    arguments = ZeroShotDetector.tiny_arguments({"threshold": 0.0, "overlap": 1.0, "batch_size": 2}, tmp_path)
    detector = ZeroShotDetector(**arguments)
    state = torch.get_rng_state()
    media = torch.rand(4, 3, 24, 48, generator=torch.Generator().manual_seed(0))
    labels = [["cat", "dog"], ["dog"], [], ["cat", "dog"]]
    found = detector.detect(media, labels)
    assert torch.equal(state, torch.get_rng_state())
    assert [len(image) > 0 for image in found] == [True, True, False, True]
    for image, names in zip(found, labels, strict=True):
        assert [one.score for one in image] == sorted((one.score for one in image), reverse=True)
        assert all(one.label in names and min(one.box) >= 0 and max(one.box) <= 1 for one in image)
    # The library's own call for one picture.
    processor = transformers.AutoProcessor.from_pretrained(arguments["model"])
    network = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(arguments["model"]).eval()
    pixels = (media[0] * 255).round().byte().permute(1, 2, 0).numpy()
    inputs = processor(
        text=[["a photo of a cat", "a photo of a dog"]], images=[pixels], return_tensors="pt", truncation=True
    )
    with torch.no_grad():
        outputs = network(**inputs)
    result = processor.post_process_grounded_object_detection(outputs, threshold=0.0, target_sizes=[(24, 48)])[0]
    best = int(result["scores"].argmax())
    assert found[0][0].score == pytest.approx(result["scores"][best].item(), abs=1e-5)
    box = (result["boxes"][best] / torch.tensor([48, 24, 48, 24])).clamp(0, 1).tolist()
    assert found[0][0].box == pytest.approx(box, abs=1e-4)
    assert found[0][0].label == ["cat", "dog"][int(result["labels"][best])]
    metadata = [{"include": [{"class": "cat"}]}] * 4
    assert CompositionReward(detector)(media, ["p"] * 4, metadata)["correct"].tolist() == [1.0] * 4


def test_detectors_that_cannot_be_loaded_or_used_say_so(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(OSError, match=r"ZeroShotDetector cannot load .*nowhere"):
        ZeroShotDetector(str(tmp_path / "nowhere")).prepare()
    with pytest.raises(ValueError, match=r"lacks \{label\}"):
        ZeroShotDetector(template="a thing")
    with pytest.raises(ValueError, match=r"threshold = 2 must lie in \[0, 1\]"):
        ZeroShotDetector(threshold=2)
