"""Classes are found by the files that define them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.discovery import discover, optional
from fedloom.errors import InputError


class Shape:
    """What the files below define."""


def in_lower_case(kind: type[Shape]) -> str | None:
    return None if kind.__name__ == "Base" else kind.__name__.lower()


def package(folder: Path, **files: str) -> Path:
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(f"from tests.test_discovery import Shape\n{text}")
    return folder


def test_the_public_classes_of_every_file_are_found_in_alphabetical_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = package(
        tmp_path / "shapes_of_fedloom",
        one="class Square(Shape): pass\nclass _Private(Shape): pass\nclass Other: pass\n",
        two="class Base(Shape): pass\nclass Circle(Base): pass\n",
    )
    found = discover([str(folder)], folder.name, Shape, in_lower_case)
    assert {name: kind.__qualname__ for name, kind in found.items()} == {"circle": "Circle", "square": "Square"}
    assert list(found) == ["circle", "square"]


def test_two_classes_with_one_name_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    folder = package(
        tmp_path / "twins_of_fedloom", one="class Square(Shape): pass\n", two="class Square(Shape): pass\n"
    )
    with pytest.raises(TypeError, match=r"the name 'square': .*one\.Square.*two\.Square"):
        discover([str(folder)], folder.name, Shape, in_lower_case)


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    assert optional("json", "Nothing needs it", "none").loads("1") == 1
    with pytest.raises(InputError, match=r"Clocks need tick: pip install 'fedloom\[clock\]'\."):
        optional("a_package_that_nobody_has", "Clocks need tick", "clock")
