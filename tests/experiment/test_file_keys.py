"""Every key of an experiment file, by its table."""

from __future__ import annotations

import pytest

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.file_keys import NAMED, find, tables


def test_all_tables_and_all_that_has_a_name_are_found() -> None:
    names = [title.strip("[]") for title in tables()] + [name for some in NAMED.values() for name in some]
    for name in names:
        for place in find(name):
            assert place.summary
            assert all(key.kind and key.default and key.meaning for key in place.keys), place.title


def test_a_key_is_found_wherever_it_is() -> None:
    places = find("epsilon")
    assert {place.title for place in places} >= {"[train]", "privacy.dp", "privacy.example_dp"}
    assert all([key.name for key in place.keys] == ["epsilon"] for place in places)


def test_a_table_has_the_keys_that_a_file_takes() -> None:
    (cohort,) = find("cohort")
    values = parse({}).resolved()["cohort"]
    assert {*values} <= {key.name for key in cohort.keys}


def test_a_word_that_means_nothing_is_an_error_with_a_hint() -> None:
    with pytest.raises(InputError, match=r"no table or key 'momentun'\. Did you mean 'momentum'\?"):
        find("momentun")
