"""Charts as SVG: where things stand, and that the text is well formed."""

import xml.etree.ElementTree as ElementTree

import pytest

from jaxllm.scaling.charts import Bar, Series, _linear_axis, _log_axis, as_file, line_chart, stacked_bars

SVG = "{http://www.w3.org/2000/svg}"


def test_equal_ratios_have_equal_distances() -> None:
    svg = line_chart("a & b", "devices", "<ms>", [Series("batch 1", [(1, 8.0), (2, 4.0), (8, 1.0)])], log_base=2)
    root = ElementTree.fromstring(svg)
    places = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in root.iter(f"{SVG}circle")]
    (x1, y1), (x2, y2), (x8, y8) = places
    assert x8 - x2 == pytest.approx(2 * (x2 - x1), abs=0.2) and y8 - y2 == pytest.approx(2 * (y2 - y1), abs=0.2)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"a & b", "<ms>", "batch 1", "devices", "1", "2", "8"} <= texts


def test_a_single_size_is_drawn_too() -> None:
    root = ElementTree.fromstring(line_chart("x", "devices", "ms", [Series("a", [(4, 2.0)]), Series("b", [(4, 0.0)])]))
    assert len(list(root.iter(f"{SVG}circle"))) == 2


def test_stacks_are_as_high_as_their_values() -> None:
    bars = [Bar("1", [("products", 3.0), ("other", 1.0)], mark=0.5), Bar("2", [("products", 1.0), ("other", 1.0)])]
    svg = stacked_bars("x", "ms", [("batch 1", bars)], colour={"products": "#111", "other": "#222"}, mark_name="launch")
    rects = [rect for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect") if rect.get("rx") is None]
    heights = [float(rect.get("height", "")) for rect in rects]
    assert heights[0] == pytest.approx(3 * heights[1], abs=0.3) and heights[2] == pytest.approx(heights[3], abs=0.2)
    assert "launch" in svg


def test_axes_have_round_ticks() -> None:
    assert _linear_axis(13.5).ticks == [0, 5, 10, 15]
    assert _linear_axis(0.07).ticks == pytest.approx([0, 0.02, 0.04, 0.06, 0.08])
    assert _log_axis([130, 99_000], 10).ticks == [100, 1000, 10_000, 100_000]
    assert _log_axis([9000, 38_000], 10).ticks == [5000, 10_000, 20_000, 50_000]
    assert _log_axis([0.7, 5.4], 2).ticks == [0.5, 1, 2, 4, 8]
    assert _log_axis([1.0, 1.0], 2).ticks == [1, 2]


def test_a_file_is_black_on_white() -> None:
    root = ElementTree.fromstring(as_file(line_chart("x", "devices", "ms", [Series("a", [(1, 2.0), (2, 1.0)])])))
    assert root[0].tag == f"{SVG}title" and root[1].get("fill") == "#fff" and root[2].get("color") == "#000"
