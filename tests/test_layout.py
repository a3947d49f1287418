"""Tests mirror the package: the tests of `fedloom/room/module.py` are in `tests/room/test_module.py`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedloom"

# modules without logic of their own, and why they need no file of tests
WITHOUT_TESTS = {
    "__main__": "starts the command line, which tests/cli runs as a process",
}


def modules() -> list[str]:
    """Every module of the package that defines a function or a class."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        defines = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.parse(file.read_text()).body)
        if defines and file.name != "__init__.py" and file.stem not in WITHOUT_TESTS:
            found.append(file.relative_to(PACKAGE).as_posix())
    return found


@pytest.mark.parametrize("module", modules())
def test_a_module_has_its_tests_at_the_same_path(module: str) -> None:
    path = Path(module)
    tests = ROOT / "tests" / path.parent / f"test_{path.name}"
    assert tests.is_file(), f"there are no tests of fedloom/{module} at {tests.relative_to(ROOT)}"
    names = [node.name for node in ast.walk(ast.parse(tests.read_text())) if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith("test_") for name in names), f"{tests.relative_to(ROOT)} tests nothing"
