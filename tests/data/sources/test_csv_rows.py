"""The rows of tables, before they become numbers."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from fedloom.data.sources.csv_rows import Rows, joined
from fedloom.errors import InputError


def rows(shown: str, features: list[str], *values: list[float]) -> Rows:
    lines = [*range(2, 2 + len(values))]
    return Rows(shown, features, {}, features, [np.array(values, dtype=np.float32)], lines)


def test_a_column_that_a_file_lacks_is_empty_in_its_rows() -> None:
    found = rows("a.csv", ["x"], [1.0], [2.0]).with_empty(["x", "y"], {"": nan})
    assert found.numeric == ["x", "y"]
    assert np.array_equal(found.numbers[0], [[1.0, nan], [2.0, nan]], equal_nan=True)
    same = rows("a.csv", ["x"], [1.0])
    assert same.with_empty(["x"], {}) is same


def test_rows_of_several_files_know_their_file_and_line() -> None:
    both = joined([rows("a.csv", ["x"], [1.0], [2.0]), rows("b.csv", ["x"], [3.0])])
    assert len(both) == 3
    assert (both.where(1), both.where(2)) == ("Line 3 of a.csv", "Line 2 of b.csv")


def test_files_with_other_columns_are_refused() -> None:
    with pytest.raises(InputError, match=r"b\.csv has no column 'x'"):
        joined([rows("a.csv", ["x"], [1.0]), rows("b.csv", ["z"], [3.0])])
