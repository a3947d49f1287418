"""Protections in plain words."""

from __future__ import annotations

import pytest

from fedloom.privacy.table import DpTable, ExampleTable, PrivacyTable, SecureTable
from fedloom.privacy.words import doubts, has, lacks, of_people, outside


@pytest.mark.parametrize(
    ("clients", "words"), [(3, "3 must stay until its end: none"), (10, "7 must stay until its end: 3")]
)
def test_secure_aggregation_says_how_many_clients_may_be_lost(clients: int, words: str) -> None:
    assert words in " ".join(has(PrivacyTable(secure_aggregation=SecureTable()), clients))


def test_without_a_number_of_clients_it_says_how_many_may_be_lost_of_some() -> None:
    """An experiment that agents bring their data to knows no number of clients."""
    assert "none of 3, 3 of 10, 33 of 100." in " ".join(has(PrivacyTable(secure_aggregation=SecureTable())))
    strict = PrivacyTable(secure_aggregation=SecureTable(min_clients=20))
    assert "none of 20, 33 of 100." in " ".join(has(strict))


def test_an_experiment_without_protection_lacks_both() -> None:
    assert list(has(PrivacyTable())) == []
    assert [sentence.partition(":")[0] for sentence in lacks(PrivacyTable())] == [
        "No secure aggregation",
        "No differential privacy",
    ]


def test_every_epsilon_comes_with_what_it_is_about() -> None:
    table = PrivacyTable(dp=DpTable(epsilon=2.0), example_dp=ExampleTable(epsilon=8.0))
    client, example = has(table)
    assert "ε = 2, δ = 1e-05, for two runs that differ in one client" in client
    assert "ε = 8, δ = 1e-05, for two data sets that differ in one of a client's examples" in example
    assert any("trust it" in sentence for sentence in lacks(table))


def test_the_neighbours_follow_from_cohorts_and_noise() -> None:
    table = PrivacyTable(dp=DpTable(epsilon=2.0, clip=1.0))
    assert "one client, replaced by another one" in " ".join(has(table, 5, whole_or_poisson=False))
    assert "one client, added or removed" in " ".join(has(table, 5))
    local = PrivacyTable(dp=DpTable(epsilon=2.0, clip=1.0, noise="local"))
    assert "in which one client has other data, even for somebody who sees its updates" in " ".join(has(local, 5))
    together = PrivacyTable(
        secure_aggregation=SecureTable(), dp=DpTable(epsilon=2.0, clip=1.0, noise="distributed", colluders=0.2)
    )
    said = " ".join(has(together, 10))
    assert "in one of which zeros replace what one client sends, even for the server and its colluders" in said
    assert "up to 2 may work with the server: the noise of 5 honest ones is enough" in said
    assert not any("trust" in sentence for sentence in lacks(together))


def test_a_delta_or_epsilon_that_protects_nobody_is_named() -> None:
    table = PrivacyTable(example_dp=ExampleTable(epsilon=8.0, delta=0.02))
    (said,) = doubts(table, 5, 90)
    assert said.startswith("[privacy] example_dp: δ = 0.02 protects hardly anybody.")
    assert "the smallest client has 90 training examples" in said
    assert not [*doubts(table, 5, 49)]
    (said,) = doubts(table)
    assert "is not known here" in said
    (said,) = doubts(PrivacyTable(dp=DpTable(epsilon=2.0, delta=0.2)), 5, 90)
    assert "the run has 5 clients" in said
    (said,) = doubts(PrivacyTable(dp=DpTable(epsilon=30.0)), 5, 90)
    assert "the presence of one client by a factor of e^30 = 1e+13" in said
    assert "Below 1 is strong, 8 is weak, and above 8 it is hardly a protection." in said
    (said,) = doubts(PrivacyTable(example_dp=ExampleTable(epsilon=10.0)), 5, 90)
    assert "e^10 = 20,000." in said
    assert not [*doubts(PrivacyTable(dp=DpTable(noise_multiplier=1.0), example_dp=ExampleTable(epsilon=8.0)), 5, 90)]
    assert "e^900." in "".join(doubts(PrivacyTable(dp=DpTable(epsilon=900.0))))


def test_a_sum_over_two_or_three_clients_is_named() -> None:
    def said(fewest: int, cohort: int | None = None, at_least: int = 0) -> str:
        table = PrivacyTable(secure_aggregation=SecureTable(min_clients=fewest))
        return " ".join(doubts(table, cohort=cohort, at_least=at_least))

    assert "over only 2 clients: each of the two can subtract its own update" in said(2, 2)
    assert "over only 3 clients: two of the three who tell each other" in said(2, 3)
    assert "over only 2 clients" in said(2)
    assert "over only 3 clients" in said(2, at_least=3)  # what a site's policy requires
    assert said(2, 10) == said(4) == said(2, at_least=4) == ""  # of 10, at least 7 stay
    noisy = PrivacyTable(secure_aggregation=SecureTable(), dp=DpTable(epsilon=2.0, clip=1.0, noise="distributed"))
    assert "have the third's, with the noise on it." in " ".join(doubts(noisy, 3))


@pytest.mark.parametrize("data", [{"normalize": "federated"}, {"scale_target": True}, {"preprocessing": "agreed.json"}])
def test_what_scales_the_data_is_outside_of_epsilon(data: dict[str, object]) -> None:
    for table in (PrivacyTable(example_dp=ExampleTable(epsilon=8.0)), PrivacyTable(dp=DpTable(epsilon=2.0))):
        (said,) = outside(table, data)
        one = "example" if table.dp is None else "client"
        assert said.endswith(f"without noise, and one {one} changes how all data is scaled: ε does not cover this.")
        of_client = [*outside(table, {"normalize": "client"})]
        assert len(of_client) == (table.dp is None)  # what a client does with its own data is part of the client
        assert [*outside(table, {"normalize": {"age": [0, 100]}})] == []
    assert [*outside(PrivacyTable(), data)] == []


def test_categories_that_examples_bring_are_outside_of_epsilon() -> None:
    private = PrivacyTable(example_dp=ExampleTable(epsilon=8.0))
    (said,) = outside(private, {"categorical": ["ward"]})
    assert said.startswith("ε does not cover which categories occur")
    assert [*outside(private, {"categorical": {"ward": ["a", "b"]}})] == []
    assert [*outside(PrivacyTable(dp=DpTable(epsilon=2.0)), {"categorical": ["ward"]})] == []


@pytest.mark.parametrize("data", [{"normalize": "federated"}, {"categorical": ["ward"]}])
def test_what_prepares_the_data_is_outside_of_masks(data: dict[str, object]) -> None:
    table = PrivacyTable(secure_aggregation=SecureTable())
    (said,) = outside(table, data)
    assert "Masks do not cover how the data is prepared" in said
    assert [*outside(table, {"normalize": "client"})] == []


def test_an_epsilon_of_examples_is_not_one_of_people() -> None:
    table = PrivacyTable(example_dp=ExampleTable(epsilon=2.0, delta=1e-5))
    (said,) = outside(table, {"group": "patient_id"})
    assert "several may be of one person (patient_id): with k examples" in said
    assert "δ grows even faster" in said
    assert [*outside(table, {})] == []
    (said,) = outside(table, {}, at_sites=True)  # nobody here knows whether sites have several rows of a person
    assert "rows and not people, and several may be of one person: with k examples" in said
    assert [*outside(PrivacyTable(dp=DpTable(epsilon=2.0)), {}, at_sites=True)] == []  # all that a client has


def test_a_site_knows_how_many_examples_of_a_person_it_has() -> None:
    table = PrivacyTable(example_dp=ExampleTable(epsilon=2.0, delta=1e-5))
    (said,) = of_people(table, "patient_id", 3)
    assert "One person (patient_id) has 3 examples here" in said
    assert said.endswith("ε = 6 with δ of up to 0.0016.")  # 3 · e^4 · 1e-5
    (said,) = of_people(table, "patient_id", 9)
    assert said.endswith("ε = 18 with no bound on δ, so no guarantee.")
    assert [*of_people(table, "patient_id", 1)] == []


def test_a_threshold_that_sites_refuse_by_default_is_said_to_be_one() -> None:
    def said(threshold: float) -> list[str]:
        table = PrivacyTable(secure_aggregation=SecureTable(threshold=threshold))
        return [text for text in has(table, 5) if "sites refuse" in text]

    assert said(0.67) == said(1.0) == []
    (text,) = said(0.6)
    assert text.startswith("On a network, sites refuse threshold = 0.6, unless their files say [policy] min_threshold")
