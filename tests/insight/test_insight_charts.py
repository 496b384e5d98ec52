"""Charts: round axes, spikes that are seen, labels that do not cover each other."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.insight.report.charts import (
    BOTTOM,
    HEIGHT,
    LABEL_GAP,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Band,
    Bands,
    Chart,
    Level,
    Line,
    Point,
    decades,
    draw,
    draw_bands,
    short,
    ticks,
)

FINITE = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


def chart(*lines: Line, **changes) -> Chart:
    return Chart(**{"id": "c", "title": "Loss", "about": "About it.", "show": short, "lines": lines, **changes})


def line(*ys: float, name: str = "a", colour: int = 1, **changes) -> Line:
    return Line(name=name, colour=colour, points=[Point(x=x, y=y) for x, y in enumerate(ys)], **changes)


def drawn(made: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(draw(made))


def classes(root: ElementTree.Element, word: str) -> list[ElementTree.Element]:
    return [found for found in root.iter() if word in found.get("class", "").split()]


def pairs(shape: ElementTree.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in shape.get("points", "").split()]


@given(FINITE, st.floats(min_value=1e-6, max_value=1e9))
def test_ticks_are_few_and_inside(low: float, room: float):
    found = ticks(low, low + room)
    assert 1 <= len(found) <= 6
    slack = 1e-6 * max(1.0, abs(low), room)
    assert all(low - slack <= tick <= low + room + slack for tick in found)


def test_ticks_are_round():
    assert ticks(0, 1) == pytest.approx([0, 0.5, 1])
    assert ticks(0, 17) == [0, 5, 10, 15]


@pytest.mark.parametrize(("value", "said"), [(0, "0"), (1500, "1.5k"), (2e6, "2M"), (0.25, "0.25"), (-3000, "-3k")])
def test_numbers_on_axes_are_short(value: float, said: str):
    assert short(value) == said


@given(st.lists(FINITE, min_size=1, max_size=40), st.booleans())
def test_every_point_lies_in_the_frame(ys: list[float], from_zero: bool):
    root = drawn(chart(line(*ys), from_zero=from_zero))
    for x, y in pairs(classes(root, "line")[0]):
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


@pytest.mark.parametrize("ys", [[0.0], [0.0, 5e-324], [3.0, 3.0], [-2.0, -2.0], [1e9, 1e9 + 1e-6]])
@pytest.mark.parametrize("from_zero", [False, True])
def test_one_value_has_an_axis_too(ys: list[float], from_zero: bool):
    root = drawn(chart(line(*ys), from_zero=from_zero))
    assert len(classes(root, "grid")) >= 2


def test_logarithmic_axes_have_equal_decades():
    points = [Point(x=10.0**power, y=10.0 ** (2 * power)) for power in range(4)]
    root = drawn(chart(Line(name="a", colour=1, points=points), log=True))
    (shape,) = classes(root, "line")
    xs, ys = zip(*pairs(shape), strict=True)
    for values in (xs, ys):
        steps = [later - earlier for earlier, later in pairwise(values)]
        assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    assert {"1", "10", "100", "1k"} <= {found.text for found in classes(root, "tick")}


def test_decades():
    assert decades(0.3, 2000) == [1, 10, 100, 1000]
    assert decades(1, 10) == [1, 10]
    assert decades(2, 5) == []


def test_a_spike_leaves_the_axis_and_is_named():
    ys = [2.0] * 200
    ys[120] = 90.0
    root = drawn(chart(line(*ys), from_zero=False))
    assert len(classes(root, "mark")) == 1
    assert "90 at 120" in [found.text for found in root.iter() if found.text]


def test_the_range_of_a_point_is_shaded():
    points = [Point(x=0, y=2, low=1, high=3), Point(x=1, y=2, low=0, high=2.5)]
    (shape,) = classes(drawn(chart(Line(name="a", colour=1, points=points))), "range")
    highest, lowest = min(y for _, y in pairs(shape)), max(y for _, y in pairs(shape))
    assert lowest == HEIGHT - BOTTOM  # a low of zero is zero, not unknown
    assert highest < lowest


def test_a_line_without_ranges_has_no_shade():
    assert classes(drawn(chart(line(1, 2, 3))), "range") == []


def test_what_was_not_finite_is_marked():
    assert len(classes(drawn(chart(line(1, 2, 3), broken=[1, 2])), "broken")) == 2


@given(st.lists(FINITE, min_size=1, max_size=6))
def test_labels_do_not_cover_each_other(lasts: list[float]):
    lines = [line(0.0, last, name=f"n{at}", colour=at + 1) for at, last in enumerate(lasts)]
    ys = sorted(float(found.get("y", "nan")) for found in classes(drawn(chart(*lines)), "label"))
    assert len(ys) == len(lasts)
    assert all(later - earlier >= LABEL_GAP - 0.2 for earlier, later in pairwise(ys))
    assert ys[0] >= 10
    assert ys[-1] <= HEIGHT - BOTTOM


def test_each_line_is_labelled_with_its_last_value():
    root = drawn(chart(line(1, 2, name="training"), line(3, 4, name="validation", colour=2)))
    said = [[span.text for span in found] for found in classes(root, "label")]
    assert sorted(said) == [["training", "2"], ["validation", "4"]]


def test_nothing_to_draw_is_said():
    assert draw(chart(missing="no peak")) == '<p class="none">n/a: no peak</p>'
    assert "n/a" in draw_bands(Bands(id="b", title="t", about="a", xs=[], bands=[]))


def test_a_level_is_drawn_where_it_fits_and_left_out_where_it_would_flatten_the_rest():
    assert len(classes(drawn(chart(line(1, 2), levels=[Level(name="predicted", y=2.5)])), "level")) == 1
    assert classes(drawn(chart(line(1, 2), levels=[Level(name="all there is", y=80)])), "level") == []


def test_bands_add_up_to_the_whole_height():
    bands = [
        Band(name="forward", colour="p1", shares=[0.4, 0.5, 0.6], share=0.5),
        Band(name="backward", colour="p4", shares=[0.6, 0.5, 0.4], share=0.5),
    ]
    root = ElementTree.fromstring(draw_bands(Bands(id="b", title="t", about="a", xs=[1, 2, 3], bands=bands)))
    first, second = (pairs(shape) for shape in classes(root, "band"))
    assert max(y for _, y in first) == HEIGHT - BOTTOM
    assert min(y for _, y in second) == TOP
    assert first[:3] == second[:2:-1]  # one's upper edge is the other's lower


def test_one_step_is_enough_for_bands():
    bands = [Band(name="forward", colour="p1", shares=[1.0], share=1.0)]
    root = ElementTree.fromstring(draw_bands(Bands(id="b", title="t", about="a", xs=[7], bands=bands)))
    assert len(pairs(classes(root, "band")[0])) == 4


def test_a_chart_says_what_it_shows_to_those_who_do_not_see_it():
    root = drawn(chart(line(1, 2)))
    assert root.get("role") == "img"
    named = root.get("aria-labelledby", "").split()
    assert [found.text for found in root if found.get("id") in named] == ["Loss", "About it."]


def test_coordinates_are_short():
    text = draw(chart(line(*(math.sin(x) for x in range(300)))))
    assert not re.search(r"\d\.\d\d", re.search(r'points="([^"]*)"', text)[1])
