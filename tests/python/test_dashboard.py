"""The dashboard for Grafana, by a real Prometheus that has watched a fleet: no panel stays empty."""
import pytest
from dashboard_fleet import panels, panels_of_an_eventful_run

# This host has no RDMA device, so these show a zero.
NOTHING_HAPPENED = {"Memory windows for RDMA"}


@pytest.fixture(scope="module")
def drawn(memory_directory):
    return {panel.title: panel for panel in panels_of_an_eventful_run(memory_directory)}


@pytest.mark.parametrize("title", [panel.title for panel in panels() if panel.kind != "row"])
def test_panel_shows_what_happened(drawn, title):
    panel = drawn[title]
    for expression, series in panel.series.items():
        assert series, f"{expression} has no value"
    assert title in NOTHING_HAPPENED or panel.highest() > 0


def test_panels_have_titles_and_places_of_their_own():
    described = panels()
    assert len({panel.title for panel in described}) == len(described)
    taken = set()
    for panel in described:
        at = panel.place
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel.title
        assert at["x"] + at["w"] <= 24
        taken |= cells
