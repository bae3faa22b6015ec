from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from genrl.report.charts import Series, line_chart, number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1"), (0.9754, "0.975"), (-0.0024, "−0.0024"), (2.41e-4, "2.41e−4"), (12.345, "12.35"),
        (123.4, "123"), (9999.0, "9999"), (72_800.0, "72.8k"), (2_500_000.0, "2.5M"),
        (math.nan, "NaN"), (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_keep_three_digits(value, text):
    assert number(value) == text


def drawing(html: str) -> ET.Element:
    return ET.fromstring(re.search(r"<svg.*?</svg>", html, re.S).group())


def test_points_lie_inside_the_frame_and_in_the_order_of_the_values():
    svg = drawing(line_chart("x", [Series("a", [0, 1, 2], [-3e-4, 5e-4, 1e-4])]))
    points = [tuple(map(float, p.split(","))) for p in svg.find("polyline").get("points").split()]
    assert all(0 <= x <= 460 and 0 <= y <= 230 for x, y in points)
    assert points[1][1] < points[2][1] < points[0][1]
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_gap_splits_the_line_and_a_lone_point_is_a_dot():
    xs = list(range(40))
    ys = [1.0] * 10 + [math.nan] * 10 + [2.0] + [math.nan] * 9 + [1.5] * 10
    svg = drawing(line_chart("x", [Series("a", xs, ys)]))
    assert len(svg.findall("polyline")) == 2
    assert len(svg.findall("circle")) == 1


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_to_draw_is_empty(values):
    assert line_chart("x", [Series("a", list(range(len(values))), values)]) == ""


@pytest.mark.parametrize(
    "values", [[0.0], [5.0, 5.0], [1e-12, 2e-12], [1e30, -1e30], [1.0, 1.0 + 1e-15], [5e-324, 0.0]]
)
def test_extreme_values_give_a_finite_drawing(values):
    html = line_chart("x", [Series("a", list(range(len(values))), values)])
    drawing(html)
    assert "nan" not in html and "inf" not in html


def test_descending_axis_runs_from_the_largest_value_on_the_left():
    svg = drawing(line_chart("x", [Series("a", [1.0, 0.5, 0.2], [0.1, 0.2, 0.3])], x_label="t", descending=True))
    xs = [float(p.split(",")[0]) for p in svg.find("polyline").get("points").split()]
    assert xs == sorted(xs) and xs[0] == 46.0
    first = svg.find("g")
    assert first.find("title").text.startswith("t: 1\n")
    assert all(float(rect.get("width")) > 1 for rect in svg.iter("rect"))
