"""The documentation site: what it generates from the code, and that it builds without a broken link or a request."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from _generate import command_line, compression_results, package, seven_ways, store  # noqa: E402
from _generate.parts import PARTS  # noqa: E402

from fedloom.aggregation.robust import RULES  # noqa: E402
from fedloom.algorithms import ALGORITHMS  # noqa: E402
from fedloom.compression.methods import METHODS  # noqa: E402
from fedloom.data.partition import PARTITIONS  # noqa: E402
from fedloom.data.sources import SOURCES  # noqa: E402
from fedloom.experiment.file_keys import tables  # noqa: E402
from fedloom.field_words import meaning  # noqa: E402
from fedloom.files import tomllib  # noqa: E402


def test_every_generated_part_stands_on_exactly_one_page() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    asked = [name for page in pages for name in re.findall(r"<!-- generated: (\w+) -->", page)]
    assert sorted(asked) == sorted(PARTS)


def test_the_pictures_of_the_seven_ways_are_those_that_the_script_draws() -> None:
    demo = tomllib.loads((ROOT / "fedloom" / "experiment" / "templates" / "demo.toml").read_text(encoding="utf-8"))
    drawn = seven_ways.pictures()
    assert [*drawn] == [*demo["algorithm"]]
    assert {path.stem: path.read_text(encoding="utf-8") for path in seven_ways.IMAGES.glob("*.svg")} == drawn
    page = (ROOT / "docs" / "explanation" / "seven-ways.md").read_text(encoding="utf-8")
    assert all(f"../images/seven-ways/{name}.svg" in page for name in drawn)


@pytest.mark.slow
def test_a_page_with_generated_parts_says_how_to_print_them_in_a_clone() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.read_text(encoding="utf-8")
        if "<!-- generated: " in page:
            assert f"`python docs/_generate/show.py {path.relative_to(ROOT)}`" in page
    command = [sys.executable, "docs/_generate/show.py", "docs/reference/algorithms.md"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "FedAvg with a pull towards the global model" in shown
    assert "<!-- generated: " not in shown


def test_the_reference_names_every_key_that_an_experiment_file_may_have() -> None:
    written = PARTS["experiment_file"]()
    for model in tables().values():
        for name in model.model_fields:
            assert f"| `{name}` |" in written


def test_every_key_has_a_meaning() -> None:
    kinds = {**tables(), **SOURCES, **PARTITIONS, **ALGORITHMS, **RULES, **METHODS}
    silent = [f"{name}: {key}" for name, kind in kinds.items() for key in kind.model_fields if not meaning(kind, key)]
    assert silent == [], "write a string under the field that says what it means"


def test_the_map_of_the_package_has_every_room() -> None:
    rooms = {path.parent.name for path in package.PACKAGE.glob("*/__init__.py")}
    for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"):
        named = set(re.findall(r"`(\w+)/`", page.read_text(encoding="utf-8")))
        assert rooms <= named, page.name


def test_the_reference_explains_every_table_and_column_of_the_store() -> None:
    assert {name: set(columns) for name, columns in store.schema().items()} == {
        name: set(columns) for name, (_, columns) in store.MEANINGS.items()
    }


def test_the_reference_has_every_command_with_its_help() -> None:
    written = command_line.commands()
    for name in ("run", "check", "serve", "data get", "agents list"):
        assert f"## fedloom {name}\n" in written
    assert not re.search(r"^\| `-.*` \|  \|$", written, re.MULTILINE), "an option has no help"


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in package.PACKAGE.rglob("*.py") if not package.first_sentence(path)]
    assert silent == []


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert loaded(page.read_text(encoding="utf-8")) == [], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s+)[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def loaded(html: str) -> list[str]:
    """The addresses on other hosts that a browser would fetch by itself when it opens this page."""
    tags = re.findall(r"<(?:script|img|iframe|source|video|audio|embed|object|link)\b[^>]*>", html)
    found = [re.search(r"(?:src|href|data)=[\"']?((?:https?:)?//[^\"'\s>]+)", tag) for tag in tags]
    return [match[1] for match, tag in zip(found, tags, strict=True) if match and 'rel="canonical"' not in tag]


def test_a_picture_from_another_host_would_be_noticed() -> None:
    assert loaded('<p><img alt="" src="https://example.org/a.png"></p>') == ["https://example.org/a.png"]
    assert loaded('<a href="https://example.org">link</a><img src="a.png">') == []


def test_the_tables_of_compression_are_those_of_the_stored_results() -> None:
    page = (ROOT / "docs" / "how-to" / "compression.md").read_text(encoding="utf-8")
    found = compression_results.tables()
    assert len(found) == 3
    for table in found:
        assert table in page
