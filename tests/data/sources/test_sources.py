from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fedloom.data import sources
from fedloom.data.sources import SOURCES, source
from fedloom.errors import InputError


def test_unknown_sources_are_explained() -> None:
    with pytest.raises(InputError, match=r"There is no source 'digit'.*Did you mean 'digits'"):
        source("digit")


@pytest.mark.parametrize("name", ["excel", "xlsx", "XLS"])
def test_excel_as_a_source_is_answered_with_csv(name: str) -> None:
    with pytest.raises(InputError, match=rf"no source '{name}': save the sheet as CSV .* and use source = \"csv\"\.$"):
        source(name)


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_unknown_fields_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no parameter 'colour'"):
        source(name)(
            colour="red", **({"path": "a"} if name != "digits" else {}), **({"label": "b"} if name == "csv" else {})
        )


def test_a_source_may_have_another_name_than_its_class() -> None:
    assert source("huggingface").__name__ == "HuggingFace"
    assert "hugging_face" not in SOURCES


def test_sources_are_found_in_their_files() -> None:
    assert {"csv", "heart_disease", "huggingface", "fashion_mnist", "leaf_reddit"} <= set(SOURCES)
    for helper in ("source", "by_client", "next_word", "custom"):
        assert helper not in SOURCES
    folder = Path(sources.__file__).parent
    assert {Path(inspect.getfile(found)).parent for found in SOURCES.values()} == {folder}
