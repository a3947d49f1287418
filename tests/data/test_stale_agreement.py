"""Data that no longer fits what sites agreed on is named, with what differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.agreement import Summary, agree
from fedloom.data.build import divided, federate
from fedloom.data.describe import describe
from fedloom.data.federation import Dataset
from fedloom.data.preprocessing import Column, Preprocessing

COLUMNS = (Column(name="age"), Column(name="crp"), Column(name="ward", categories=("er", "icu")))
SITES = np.repeat(["berlin", "oslo"], 200)


def table(**changed: Any) -> Dataset:
    draws = np.random.default_rng(1)
    columns = {"age": draws.normal(60, 10, 400), "crp": draws.normal(5, 2, 400), "er": np.arange(400) % 2} | changed
    x = np.stack([columns["age"], columns["crp"], columns["er"], 1 - columns["er"]], axis=1)
    known = Preprocessing(columns=COLUMNS, label=("dead",))
    y = torch.arange(400) % 2
    return Dataset(
        torch.tensor(x).float(), y, SITES, classes=("no", "yes"), features=known.features, preprocessing=known
    )


AGREED = Preprocessing(
    columns=COLUMNS, mean=(60.0, 5.0, 0.5, 0.5), std=(10.0, 2.0, 0.5, 0.5), shape=(4,), classes=("no", "yes")
)


def told(data: Dataset, start: str, normalize: str = "federated", agreed: Preprocessing | None = AGREED) -> list[str]:
    said = describe(federate(data, normalize=normalize, agreed=agreed)).warnings
    return [text for text in said if text.startswith(start)]


@pytest.mark.parametrize("normalize", ["federated", "none"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"age": np.random.default_rng(2).normal(50, 10, 400)}, "age is "),
        ({"crp": np.random.default_rng(2).normal(5, 9, 400)}, "crp is "),
        ({"er": np.zeros(400)}, "nobody has ward=er, and 50% had it"),
    ],
)
def test_what_has_changed_since_sites_agreed_is_named(changed: dict[str, Any], said: str, normalize: str) -> None:
    (text,) = told(table(**changed), "The data is not what the sites agreed on", normalize)
    assert f"agreed on: {said}" in text
    assert text.count(" here, and was ") + text.count("nobody has") == 1
    assert "Agree again: `fedloom data summarize` at each site" in text


def test_the_tables_that_were_agreed_on_and_a_single_site_are_no_news() -> None:
    assert not told(table(), "The data is not")
    assert not told(table(age=np.full(400, 20.0)), "The data is not", agreed=None)
    one = replace(table(age=np.random.default_rng(2).normal(50, 10, 400)), client=np.repeat(["oslo"], 400))
    assert not told(one, "The data is not")


def test_a_site_is_not_compared_with_all_sites_however_many_clients_it_has() -> None:
    """Otherwise wards of a site whose patients are younger than others' look like tables that have changed."""
    young = federate(table(age=np.random.default_rng(2).normal(50, 10, 400)), normalize="federated", agreed=AGREED)
    assert any("The data is not what the sites agreed on" in text for text in describe(young).warnings)
    assert not any("agree again" in text.casefold() for text in describe(young, at_site=True).warnings)


@pytest.mark.parametrize("clients", [["berlin", "oslo"], ["oslo"]])
def test_a_site_with_another_unit_is_told_to_convert_and_not_to_agree_again(clients: list[str]) -> None:
    other = replace(
        table(crp=np.random.default_rng(2).normal(5000, 2000, 400)), client=np.resize(np.sort(clients), 400)
    )
    said = describe(federate(other, normalize="federated", agreed=AGREED), at_site=True).warnings
    assert "set convert = { crp = 0.001 } in [data]" in next(text for text in said if text.startswith("crp is about"))
    assert any(text.endswith("as the sites agreed, which does not fit another unit.") for text in said)
    assert not any("agree again" in text.casefold() for text in said)


def test_a_client_in_another_unit_has_one_caution() -> None:
    units = table(crp=np.random.default_rng(2).normal(5, 2, 400) * np.where(SITES == "oslo", 1000, 1))
    said = describe(federate(units, normalize="federated", agreed=AGREED)).warnings
    assert any(text.startswith("crp is about 1,0") for text in said)
    assert not any("agree again" in text.casefold() for text in said)


def agreed_by_sites(x: np.ndarray[Any, Any]) -> tuple[Dataset, Preprocessing]:
    """Return a table, and what two sites with its rows agree on: each divides its rows alone."""
    columns = tuple(Column(name=f"x{place}") for place in range(x.shape[1]))
    known = Preprocessing(columns=columns, label=("dead",))
    whole = Dataset(
        torch.tensor(x).float(),
        torch.arange(400) % 2,
        SITES,
        classes=("no", "yes"),
        features=known.features,
        preprocessing=known,
    )
    summaries = {}
    for name in ("berlin", "oslo"):
        own = np.equal(SITES, name)
        site = replace(whole, x=whole.x[own], y=whole.y[own], client=SITES[own])
        summaries[name] = Summary.of(divided(site), missing=False, site=name)
    return whole, agree(summaries)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_tables_with_a_few_large_values_have_not_changed(seed: int) -> None:
    x = np.random.default_rng(seed).lognormal(0, 1.3, (400, 10))
    x[:, 9] = 0.0
    x[seed, 8] *= 1e4  # somebody's typing mistake, which another split has elsewhere
    x[np.random.default_rng(seed).integers(400), 9] = 1.0  # never varies where it is in no training row
    whole, agreed = agreed_by_sites(x)
    assert not told(whole, "The data is not", agreed=agreed)
    assert told(replace(whole, x=whole.x + 10), "The data is not", agreed=agreed)


def test_a_later_test_set_is_not_what_sites_agree_on() -> None:
    """Sites agree on training rows: what drifts from these to the others is no change of tables."""
    x = np.random.default_rng(1).normal(0, 1, (400, 1))
    late = np.arange(400) % 5 == 0
    x[late] += 3
    whole, _ = agreed_by_sites(x)
    whole = replace(whole, split=np.where(late, 2, 0))
    known = Preprocessing(
        columns=whole.preprocessing.columns, mean=(x[~late].mean(),), std=(x[~late].std(),), shape=(1,)
    )
    assert not told(whole, "The data is not", agreed=known)


def test_advice_about_the_scale_is_none_that_an_agreed_file_refuses() -> None:
    large = table(crp=np.random.default_rng(2).normal(5000, 2000, 400))
    assert told(large, "Features differ in scale", "none")[0].endswith(
        "Leave normalize out: features are then scaled as the sites agreed."
    )
    assert "as the sites agreed, which does not fit this data. Agree again:" in told(large, "Features differ")[0]
    assert told(large, "Features differ", "none", None)[0].endswith('Set normalize = "federated" or "client".')
