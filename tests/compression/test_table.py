"""[compress]: what it accepts, what it refuses, and why."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.algorithm import Algorithm
from fedloom.algorithms import ALGORITHMS
from fedloom.compression.methods import METHODS
from fedloom.compression.table import CompressTable
from fedloom.errors import InputError
from fedloom.experiment.description import identity
from fedloom.experiment.experiment_file import parse
from fedloom.privacy.table import PrivacyTable, SecureTable

MASK = {"name": "randomk", "mask": "round"}
SECURE = PrivacyTable(secure_aggregation=SecureTable())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"up": "topkk"}, "There is no compression 'topkk'. Known: .* Did you mean 'topk'"),
        ({"up": {"keep": 0.1}}, "A compression is a name"),
        ({"up": 3}, "A compression is a name"),
        ({"up": {"name": "topk", "keep": 0.0}}, "The 'keep' parameter of TopK must be more than 0"),
        ({"up": {"name": "topk", "keep": 1.01}}, "The 'keep' parameter of TopK must be at most 1"),
        ({"up": {"name": "qsgd", "bits": 9}}, "The 'bits' parameter of QSGD must be at most 8"),
        ({"up": {"name": "topk", "kep": 0.1}}, "Did you mean 'keep'"),
        ({"down": "topk"}, "down must be bfloat16, float16, lossless. Got 'topk', which compresses changes"),
        ({"down": {"name": "float16", "error_feedback": True}}, "down has no error_feedback"),
        ({"sideways": "topk"}, "no key 'sideways'"),
    ],
)
def test_bad_input_gets_a_clear_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse({"compress": table})


def test_it_is_part_of_the_identity_only_if_it_is_there() -> None:
    plain = parse({})
    assert "compress" not in plain.description()
    assert identity(parse({"compress": {}}).description()) == identity(plain.description())
    one, other = (parse({"compress": {"up": {"name": "topk", "keep": keep}}}) for keep in (0.1, 0.01))
    found = {identity(experiment.description()) for experiment in (plain, one, other)}
    assert len(found) == 3
    assert one.resolved()["compress"] == {"up": {"name": "topk", "keep": 0.1, "error_feedback": True}}
    again = parse(one.resolved())
    assert again.compress == one.compress


def refused(table: CompressTable, algorithm: Algorithm, privacy: PrivacyTable | None = None) -> str:
    try:
        table.check(algorithm, privacy)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", METHODS)
def test_secure_aggregation_takes_only_what_commutes_with_sums(name: str) -> None:
    fedavg = ALGORITHMS["fedavg"]()
    assert "a sum of changes that were compressed one by one cannot be decoded" in refused(
        CompressTable(up=name), fedavg, SECURE
    )
    assert refused(CompressTable(up=name), fedavg) == ""
    assert refused(CompressTable(up=MASK), fedavg, SECURE) == ""


def test_algorithms_that_need_exact_sums_take_only_lossless() -> None:
    exact = [name for name, kind in ALGORITHMS.items() if not kind.takes_noise and not kind.pooled]
    assert "fednova" in exact
    for name in exact:
        for table in (CompressTable(up="topk"), CompressTable(down="float16")):
            assert "hold for exact sums" in refused(table, ALGORITHMS[name]())
        assert refused(CompressTable(up="lossless", down="lossless"), ALGORITHMS[name]()) == ""


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "feddc"])
def test_sums_on_both_sides_need_error_feedback(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    assert "would drift away" in refused(CompressTable(up="qsgd"), algorithm)
    assert refused(CompressTable(up="topk"), algorithm) == ""
    assert refused(CompressTable(up="lossless"), algorithm) == ""


def test_clients_that_do_not_count_would_lose_what_was_left_out() -> None:
    ifca = ALGORITHMS["ifca"](clusters=2)
    assert "could be lost" in refused(CompressTable(up="topk"), ifca)
    assert refused(CompressTable(up="qsgd"), ifca) == ""


def test_robust_rules_do_not_compare_changes_with_zeros() -> None:
    robust = ALGORITHMS["fedavg"](rule="median")
    assert "compare them with zeros" in refused(CompressTable(up="topk"), robust)
    assert "compare them with zeros" in refused(CompressTable(up="randomk"), robust)
    for fine in ({**MASK, "error_feedback": False}, "qsgd", "eden", "float16"):
        assert refused(CompressTable(up=fine), robust) == ""


def test_what_a_robust_rule_leaves_out_would_be_lost_to_error_feedback() -> None:
    for up in (MASK, "powersgd"):
        message = refused(CompressTable(up=up), ALGORITHMS["fedavg"](rule="median"))
        assert "what error feedback added to them would be lost" in message


@pytest.mark.parametrize("name", ["selective", "peer"])
def test_answers_that_are_not_summed_are_not_compressed_so_it_is_refused(name: str) -> None:
    for method in ("float16", "topk", "lossless"):
        assert "only what becomes a sum is compressed" in refused(CompressTable(up=method), ALGORITHMS[name]())
    assert refused(CompressTable(down="float16"), ALGORITHMS[name]()) == ""
