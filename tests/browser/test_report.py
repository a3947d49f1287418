"""The report in a real browser: everybody can read it, and it asks for nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.results import report
from tests.browser.test_page import Open
from tests.watch.growing_run import GrowingRun


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_out(
    tmp_path: Path, open_page: Open, barriers: Callable[[Any], list[str]], scheme: str
) -> None:
    GrowingRun(tmp_path / "run").add(4).end().store.close()
    page = open_page(report.write(tmp_path / "run").as_uri(), 390, scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert barriers(page) == []


def test_text_of_figures_can_be_read_on_a_phone(tmp_path: Path, open_page: Open) -> None:
    GrowingRun(tmp_path / "run").add(4).end().store.close()
    page = open_page(report.write(tmp_path / "run").as_uri(), 390)
    heights = page.evaluate(
        "[...document.querySelectorAll('.drawing text')].map((one) => one.getBoundingClientRect().height)"
        ".filter((height) => height > 0)"  # what is for wide screens has none
    )
    assert len(heights) > 20
    assert min(heights) >= 8
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # figures scroll, the page does not


@pytest.mark.parametrize("width", [390, 1280])
def test_the_result_at_a_glance_fits_the_screen(tmp_path: Path, open_page: Open, width: int) -> None:
    GrowingRun(tmp_path / "run").add(4).end().store.close()
    page = open_page(report.write(tmp_path / "run").as_uri(), width)
    shown = page.evaluate(
        "[...document.querySelector('figure').querySelectorAll('.drawing')].filter((one) => one.clientWidth > 0)"
        ".map((one) => [one.className.includes('on-phones'), one.scrollWidth <= one.clientWidth])"
    )
    assert shown == [[width == 390, True]]
