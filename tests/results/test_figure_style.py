"""The style that all figures share."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.colors import to_rgb

from fedloom.data import figure as data_figure
from fedloom.errors import InputError
from fedloom.results import figure_style as style


def test_the_first_72_line_styles_differ() -> None:
    found = [style.line_style(number) for number in range(72)]
    assert len({(one["color"], str(one["linestyle"])) for one in found}) == 72
    assert len({one["color"] for one in found[:8]}) == 8


@pytest.mark.parametrize("colour", style.COLOURS)
def test_every_colour_can_be_seen_on_white(colour: str) -> None:
    """The contrast of WCAG, which wants 3 for graphics; Okabe and Ito's yellow has 1.3."""
    shares = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in to_rgb(colour)]
    luminance = sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), shares, strict=True))
    assert 1.05 / (luminance + 0.05) > 2.2


def test_names_in_other_letters_are_drawn_without_warnings(tmp_path: Path) -> None:
    """Warnings are errors in these tests. No font can be assumed, so this must hold without any."""
    with style.styled():
        figure = style.new_figure(2, 1)
        figure.add_subplot().set_title("北京 東京 서울 नई दिल्ली القاهرة")
        drawn = style.lay_out(style.CaptionedFigure("names", "", "", figure))
    paths = drawn.save(tmp_path)
    assert [path.suffix for path in paths] == [".png", ".svg", ".pdf"]
    assert "北京 東京 서울" in paths[1].read_text(encoding="utf-8")
    assert paths[2].read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(("low", "high"), [(0.9878, 0.9983), (0.12, 0.17), (0.0, 1.0), (0.95, 0.9512)])
def test_ticks_in_per_cent_are_labelled_with_the_numbers_where_they_are(low: float, high: float) -> None:
    axes = style.new_figure(3, 2).add_subplot()
    axes.set_ylim(low, high)
    style.show_percent(axes.yaxis, percent=True)
    ticks = axes.get_yticks().tolist()
    shown = [float(text.removesuffix(" %")) for text in axes.yaxis.get_major_formatter().format_ticks(ticks)]
    assert shown == pytest.approx([100 * tick for tick in ticks], abs=1e-9)


def test_a_long_label_is_broken_into_lines_that_fit_a_panel() -> None:
    assert style.panel_titles(["fedavg"]) == {"fedavg": "fedavg"}
    words = "-".join(f"word{number}-of-14xx" for number in range(4))
    for label in ("a-label-of-forty-letters-" + "x" * 15, words):
        lines = style.panel_titles([label])[label].split("\n")
        assert "".join(lines) == label
        assert len(lines) <= 3
        assert max(map(len, lines)) <= 26


def test_titles_of_panels_that_must_be_shortened_stay_different() -> None:
    labels = [f"{'a-long-label-' * 8}{number}" for number in range(3)]
    titles = style.panel_titles(labels)
    assert len({*titles.values()}) == 3
    assert max(len(title.split("\n")) for title in titles.values()) <= 3


def test_a_legend_of_many_names_has_columns_and_takes_room_for_them() -> None:
    figure = style.new_figure(8, 4)
    axes = figure.add_subplot()
    for number in range(45):
        axes.plot([0, 1], [number, number], label=f"line {number}")
    style.add_legend(figure)
    (legend,) = figure.legends
    assert legend._ncols == 3
    few, many = style.legend_size(["a" * 10] * 20), style.legend_size(["a" * 10] * 60)
    assert many[0] == pytest.approx(3 * few[0])
    assert many[1] == few[1]


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


def fonts(path: Path) -> set[bytes]:
    """The kinds of fonts in a PDF file."""
    return {*re.findall(rb"/Subtype /((?:Type|TrueType|CIDFont)\w*)", path.read_bytes())}


@pytest.mark.parametrize("write", ["a figure of a report", "a picture"])
def test_fonts_in_a_pdf_are_truetype(tmp_path: Path, write: str) -> None:
    """Many publishers refuse Type 3, which is matplotlib's usual kind."""
    before = dict(matplotlib.rcParams)
    with style.styled():
        figure = style.new_figure(2, 1)
        figure.add_subplot().set_title("Zürich − 100 %")
    if write == "a picture":
        style.save_figure(figure, tmp_path / "name.pdf")
    else:
        style.CaptionedFigure("name", "", "", figure).save(tmp_path)
    assert fonts(tmp_path / "name.pdf") == {b"Type0", b"CIDFontType2"}
    assert dict(matplotlib.rcParams) == before


@pytest.mark.skipif(
    not any("CJK" in name for name in data_figure.font_families()), reason="No font for Chinese letters is installed."
)
def test_a_font_with_postscript_outlines_is_not_embedded_as_truetype(tmp_path: Path) -> None:
    """Acrobat refuses a file in which matplotlib calls such a font TrueType."""
    figure = style.new_figure(2, 1)
    with style.styled():
        figure.add_subplot().set_title("北京")
    style.save_figure(figure, tmp_path / "name.pdf")
    assert fonts(tmp_path / "name.pdf") == {b"Type3"}


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


def test_a_figure_is_saved_as_png_pdf_and_svg_with_text(tmp_path: Path) -> None:
    with style.styled():
        figure = style.new_figure(2, 1)
        figure.add_subplot().set_title("a title")
    drawn = style.lay_out(style.CaptionedFigure("name", "Title", "Caption.", figure))
    assert [path.name for path in drawn.save(tmp_path)] == ["name.png", "name.svg", "name.pdf"]
    assert ">a title<" in (tmp_path / "name.svg").read_text()
    assert "<metadata>" not in drawn.svg
