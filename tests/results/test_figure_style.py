"""The style that all figures share."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from fedloom.errors import InputError
from fedloom.results import figure_style as style


def test_the_first_forty_line_styles_differ() -> None:
    found = [style.line_style(number) for number in range(40)]
    assert len({(one["color"], str(one["linestyle"])) for one in found}) == 40
    assert len({one["color"] for one in found[:8]}) == 8


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf", ".PNG"])
def test_the_ending_of_the_path_is_the_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    style.save_figure(style.new_figure(1, 1), path)
    if suffix == ".svg":
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert "<dc:date>" not in path.read_text()
    else:
        assert path.read_bytes().startswith(b"%PDF" if suffix == ".pdf" else b"\x89PNG")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must end in \.png, \.svg, \.pdf\. Got 'picture\.bmp'"):
        style.save_figure(style.new_figure(1, 1), tmp_path / "picture.bmp")


def test_the_style_holds_only_inside_its_block() -> None:
    before = dict(matplotlib.rcParams)
    with style.styled():
        assert matplotlib.rcParams["svg.fonttype"] == "none"
        assert matplotlib.rcParams["axes.edgecolor"] == style.FAINT
        assert matplotlib.rcParams["axes.labelcolor"] == style.INK
    assert dict(matplotlib.rcParams) == before


def test_a_grid_has_at_most_four_panels_in_a_row_and_hides_the_spare_ones() -> None:
    for count, shape in {1: (1, 1), 4: (1, 4), 5: (2, 3), 7: (2, 4), 30: (3, 4)}.items():
        _, axes = style.panel_grid([str(number) for number in range(count)], 1.0)
        assert len(axes) == shape[0] * shape[1]
        assert sum(one.get_visible() for one in axes) == min(count, style.MOST_PANELS)


def test_shares_are_cut_to_between_0_and_1() -> None:
    assert style.clip_share([-0.1, 0.5, 1.2], percent=True).tolist() == [0.0, 0.5, 1.0]
    assert style.clip_share([-0.1, 1.2], percent=False) == [-0.1, 1.2]


def test_few_points_get_markers() -> None:
    axes = style.new_figure(1, 1).add_subplot()
    for count in (3, 30):
        style.plot_line(axes, range(count), range(count), color="#000000")
    assert [line.get_marker() for line in axes.lines] == ["o", "None"]


def test_a_figure_is_saved_as_png_and_as_svg_with_text(tmp_path: Path) -> None:
    with style.styled():
        figure = style.new_figure(2, 1)
        figure.add_subplot().set_title("a title")
    drawn = style.lay_out(style.CaptionedFigure("name", "Title", "Caption.", figure))
    assert [path.name for path in drawn.save(tmp_path)] == ["name.png", "name.svg"]
    assert ">a title<" in (tmp_path / "name.svg").read_text()
    assert "<metadata>" not in drawn.svg
