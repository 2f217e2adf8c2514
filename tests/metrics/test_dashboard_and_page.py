"""The documents describe the metrics that the code has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxllm.metrics.prometheus import exposition
from scripts import make_metrics_page

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "jaxllm.json").read_text(encoding="utf-8"))
_NAME = re.compile(r"\b(?:jaxllm:|http_|process_)\w+")


def expressions(part: Any) -> list[str]:
    """Every Prometheus query in a dashboard."""
    if isinstance(part, list):
        return [found for each in part for found in expressions(each)]
    if not isinstance(part, dict):
        return []
    own = [part[key] for key in ("expr", "query") if isinstance(part.get(key), str)]
    return own + [found for each in part.values() for found in expressions(each)]


@pytest.fixture(scope="module")
def offered() -> set[str]:
    """The names of all samples on the page that Prometheus reads."""
    page = exposition(make_metrics_page.every_metric()).decode()
    return {line.split("{")[0].split(" ")[0] for line in page.splitlines() if not line.startswith("#")}


def test_every_metric_that_the_dashboard_asks_for_exists(offered: set[str]) -> None:
    asked = {name for expression in expressions(DASHBOARD) for name in _NAME.findall(expression)}
    assert len(asked) > 20
    assert asked <= offered


def test_panels_have_distinct_ids_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        grid = panel["gridPos"]
        own = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not own & places and max(x for x, _ in own) < 24, panel["title"]
        places |= own


def test_all_series_of_a_metric_have_the_same_labels() -> None:
    labels: dict[str, set[str]] = {}
    for metric in make_metrics_page.every_metric():  # the page is written with the names of the first
        assert labels.setdefault(metric.name, set(metric.labels)) == set(metric.labels), metric.name


def test_the_page_is_up_to_date() -> None:
    assert make_metrics_page.PAGE.read_text(encoding="utf-8") == make_metrics_page.page(), "run scripts/make_metrics_page.py"
