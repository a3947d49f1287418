"""Names of classes that are probably a mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedloom.data.build import federate
from fedloom.data.class_names import classes_of_one_client, clients_spelt_differently, doubts, same_meaning
from fedloom.data.federation import Federation
from fedloom.data.plausibility import suspicions
from fedloom.data.sources.csv import Csv


def test_classes_that_may_mean_the_same_are_named(tmp_path: Path) -> None:
    outcomes = ("Dead", "dead", "alive")
    (tmp_path / "data.csv").write_text("a,y\n" + "".join(f"{row},{outcomes[row % 3]}\n" for row in range(24)))
    federation = federate(Csv(path=tmp_path / "data.csv", label="y").load(tmp_path), clients=2)
    said = "y has classes that may mean the same and are learnt as different ones: Dead, dead."
    assert [one.partition(" If so")[0] for one in suspicions(federation) if "mean the same" in one] == [said]
    letters = Federation.from_arrays(np.zeros((4, 1)), [0, 1, 0, 1], client=["a", "a", "b", "b"])
    assert not any("mean the same" in one for one in suspicions(replace(letters, classes=("A", "a"))))


def test_clients_of_a_column_or_of_files_that_may_be_one_are_named(tmp_path: Path) -> None:
    rows = [f"{place},{client},{place % 2}" for client in ("School-A", "school-A", "school-B") for place in range(8)]
    (tmp_path / "all.csv").write_text("\n".join(["a,school,y", *rows]))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("School-A", "school A", "school-B"):
        (folder / f"{name}.csv").write_text("\n".join(["a,y", *(f"{place},{place % 2}" for place in range(8))]))
    for source, names in (
        (Csv(path=tmp_path / "all.csv", label="y", client="school"), "School-A, school-A"),
        (Csv(path=folder, label="y"), "School-A, school A"),
    ):
        (said,) = (one for one in suspicions(federate(source.load(tmp_path))) if "count as different clients" in one)
        assert said.startswith(f"Clients whose names may mean the same count as different clients: {names}. ")


def test_clients_that_differ_in_a_number_or_a_letter_are_different() -> None:
    names = ["client-1", "client-2", "site A", "site B", "-1", "1", "ward 1-23", "ward 12-3", "ward 1_2", "ward 12"]
    assert [*clients_spelt_differently(names)] == []
    assert len([*clients_spelt_differently(["St. Mary", "st mary", "site_1", "Site 1"])]) == 1


def test_spaces_around_a_name_have_no_meaning() -> None:
    assert same_meaning(["Dead", "dead ", " DEAD", "alive"]) == [["Dead", "dead ", " DEAD"]]


def test_letters_are_not_taken_for_yes_and_no() -> None:
    assert same_meaning("abcdefghijklmnopqrstuvwxyz01") == []
    assert same_meaning(["Y", "N", "0", "no"]) == [["N", "0", "no"]]
    assert same_meaning(["ja", "nein", "True", "False"]) == [["ja", "True"], ["nein", "False"]]


def test_classes_that_one_client_has_alone_are_counted(tmp_path: Path) -> None:
    rows = {"north": ["dead", "alive"], "south": ["dead", "alive", "daed"], "west": ["1", "0", "0"]}
    for name, labels in rows.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,out", *(f"{5 + len(one)},{one}" for one in labels)]))
    dataset = Csv(path=tmp_path, label="out").load(tmp_path)
    said = classes_of_one_client(federate(dataset))
    assert "has 0 (2 rows of west), 1 (1 row of west), daed (1 row of south): are they spelt differently" in said
    rows = np.arange(len(dataset.y)).repeat(9)
    many = replace(
        dataset, client=np.asarray(dataset.client)[rows], y=torch.as_tensor(dataset.y)[rows], x=dataset.x[rows]
    )
    assert "has 0 (18 rows of west), 1 (9 rows of west), daed (9" in classes_of_one_client(federate(many))
    apart = replace(dataset, client=np.asarray(dataset.y))  # every class has its client
    assert classes_of_one_client(federate(apart)) == ""


def test_clients_that_differ_in_their_classes_are_no_mistake_but_learn_them_alone(tmp_path: Path) -> None:
    here = {"biscoe": {"adelie": 8, "gentoo": 9}, "dream": {"adelie": 8, "chinstrap": 7}, "torgersen": {"adelie": 8}}
    rows = [f"{island},{kind}" for island, kinds in here.items() for kind, count in kinds.items() for _ in range(count)]
    (tmp_path / "all.csv").write_text("a,island,y\n" + "".join(f"{place},{row}\n" for place, row in enumerate(rows)))
    dataset = Csv(path=tmp_path / "all.csv", label="y", client="island").load(tmp_path)
    assert doubts(federate(dataset)) == ""
    (said,) = (one for one in suspicions(federate(dataset)) if "Only one client" in one)
    assert said.startswith("Only one client has chinstrap (7 rows of dream), gentoo (9 rows of biscoe). Each is learnt")
    divided = federate(dataset, partition={"name": "shards", "per_client": 1}, clients=3)
    assert not any("Only one client" in one for one in suspicions(divided))  # as somebody chose


def test_only_classes_that_seem_right_get_an_output_each_without_a_question() -> None:
    def said(*names: str) -> str:
        labels = list(range(len(names))) * 2
        federation = Federation.from_arrays(np.zeros((len(labels), 1)), labels, clients=2)
        return doubts(replace(federation, classes=names))

    assert said("benign", "malignant") == said("none", "mild", "severe") == said("0", "1") == ""
    assert "may mean the same (Benign, benign)" in said("Benign", "benign", "malignant")
    assert 'set task = "regression"' in said("1", "2", "3")
    assert "look like dates" in said("2024-03-31", "2024-04-01", "2024-04-02")
    assert doubts(Federation.from_arrays(np.zeros((4, 1)), [0.5, 1.5, 2.5, 3.5], clients=2)) == ""
