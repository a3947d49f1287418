"""Server halves as Flower strategies: the algorithm's own bits, and replies that Flower would have added up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

import fedloom
from fedloom.errors import InputError
from fedloom.flower import strategy

NODES = (5, 3, 9)


class Nodes:
    """As much of a Grid as a strategy needs."""

    def get_node_ids(self) -> Sequence[int]:
        return NODES


def arrays(**leaves: Any) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(leaf, dtype=np.float32)) for name, leaf in leaves.items()})


def reply(node: int, record: ArrayRecord | None, examples: Any = 1, key: str = "num-examples", **metrics: Any) -> Any:
    content = RecordDict({"metrics": MetricRecord({key: examples, **metrics})})
    if record is not None:
        content["arrays"] = record
    return SimpleNamespace(metadata=SimpleNamespace(src_node_id=node), content=content, has_error=lambda: False)


def begin(made: Any, record: ArrayRecord, number: int = 1) -> Any:
    config = ConfigRecord()
    assert len(list(made.configure_train(number, record, config, Nodes()))) == len(NODES)
    return config


def values(record: ArrayRecord) -> dict[str, list[float]]:
    return {name: array.numpy().tolist() for name, array in record.items()}


def test_fedavg_takes_the_mean_by_examples() -> None:
    made = strategy(fedloom.FedAvg())
    begin(made, arrays(w=[0.0, 0.0]))
    found, metrics = made.aggregate_train(
        1, [reply(3, arrays(w=[4.0, 0.0]), 3, loss=1.0), reply(5, arrays(w=[0.0, 8.0]), 1, loss=3.0)]
    )
    assert values(found) == {"w": [3.0, 2.0]}
    assert metrics["loss"] == 1.5


def test_the_order_of_arrival_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    sent = [reply(node, arrays(w=torch.randn(1000, generator=generator).numpy()), node) for node in NODES]
    found = []
    for order in (sent, sent[::-1]):
        made = strategy(fedloom.FedAvg())
        begin(made, arrays(w=np.zeros(1000)))
        found.append(made.aggregate_train(1, order)[0]["w"].numpy().tobytes())
    assert found[0] == found[1]


def test_fedadam_keeps_its_moments_between_rounds() -> None:
    algorithm = fedloom.FedAdam(server_lr=0.5, beta1=0.5, beta2=0.25, tau=0.1)
    made = strategy(algorithm)
    w, first, second = 1.0, 0.0, 0.0
    record = arrays(w=[w])
    for number, change in ((1, 2.0), (2, -1.0)):
        begin(made, record, number)
        sent = [reply(node, arrays(w=[w + change]), 10 * node) for node in NODES]
        record = made.aggregate_train(number, sent)[0]
        first, second = 0.5 * first + 0.5 * change, 0.25 * second + 0.75 * change**2
        w += 0.5 * first / (second**0.5 + 0.1)
        assert values(record)["w"] == pytest.approx([w], rel=1e-6)


def test_buffers_are_averaged_and_take_no_adaptive_step() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    start = {name: leaf.numpy() for name, leaf in net.state_dict().items()}
    record = ArrayRecord({name: Array(leaf) for name, leaf in start.items()})
    made = strategy(fedloom.FedAvgM(server_lr=0.5, server_momentum=0.0), net)
    begin(made, record)
    sent = ArrayRecord({n: Array(np.asarray(leaf + np.asarray(2, leaf.dtype))) for n, leaf in start.items()})
    found = made.aggregate_train(1, [reply(node, sent) for node in NODES])[0]
    assert np.allclose(found["0.weight"].numpy(), start["0.weight"] + 1)
    assert np.allclose(found["1.running_mean"].numpy(), start["1.running_mean"] + 2)
    assert found["1.num_batches_tracked"].numpy() == 2
    with pytest.raises(InputError, match=r"such as '1\.running_mean': give the model itself"):
        begin(strategy(fedloom.FedAvg()), record)


def test_a_robust_rule_takes_the_place_of_the_mean() -> None:
    made = strategy(fedloom.FedAvg(rule="median", weights="uniform"))
    begin(made, arrays(w=[0.0]))
    sent = [reply(node, arrays(w=[value])) for node, value in zip(NODES, (1.0, 2.0, 1e6), strict=True)]
    assert values(made.aggregate_train(1, sent)[0]) == {"w": [2.0]}


def test_fedprox_tells_clients_its_mu() -> None:
    assert begin(strategy(fedloom.FedProx(mu=0.25)), arrays(w=[0.0]))["proximal-mu"] == 0.25


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (reply(3, arrays(w=[np.nan, 0.0])), "not-finite"),
        (reply(3, arrays(w=[1.0])), "shape"),
        (reply(3, ArrayRecord({"w": Array(np.zeros(2))})), "dtype"),
        (reply(3, arrays(w=[1.0, 1.0], x=[1.0])), "keys"),
        (reply(3, arrays(w=[100.0, 0.0])), "norm"),
        (reply(3, arrays(w=[1.0, 1.0]), -1), "weight"),
        (reply(3, arrays(w=[1.0, 1.0]), float("nan")), "weight"),
        (reply(3, arrays(w=[1.0, 1.0]), [1, 2]), "weight"),
        (reply(3, arrays(w=[1.0, 1.0]), 1e10), "weight"),
        (reply(3, arrays(w=[1.0, 1.0]), key="examples"), "malformed"),
        (reply(3, None), "malformed"),
        (reply(3, ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"no array")})), "malformed"),
        (
            SimpleNamespace(
                metadata=SimpleNamespace(src_node_id=3),
                error=SimpleNamespace(reason="crashed"),
                has_error=lambda: True,
            ),
            "malformed",
        ),
    ],
)
def test_a_bad_reply_is_left_out_with_a_reason(bad: Any, why: str) -> None:
    made: Any = strategy(fedloom.FedAvg(), norm_bound=50.0)
    begin(made, arrays(w=[0.0, 0.0]))
    found, _ = made.aggregate_train(1, [reply(5, arrays(w=[1.0, 2.0])), bad])
    assert values(found) == {"w": [1.0, 2.0]}
    ((node, told),) = made.rejected
    assert node == 3
    assert told.startswith(why)


def test_a_round_with_too_few_valid_replies_changes_nothing() -> None:
    made = strategy(fedloom.FedAvg(), quorum=0.6)
    begin(made, arrays(w=[0.0]))
    good, bad = reply(5, arrays(w=[1.0])), reply(3, arrays(w=[np.inf]))
    assert made.aggregate_train(1, [good, bad]) == (None, None)
    assert made.aggregate_train(1, [good, reply(3, arrays(w=[3.0]))])[0] is not None


@pytest.mark.parametrize(
    "algorithm",
    [
        fedloom.Scaffold(),
        fedloom.Ditto(),
        fedloom.PerFedAvg(),
        fedloom.Peer(),
        fedloom.Staged(groups=2),
        fedloom.FedNova(),
        fedloom.EvaluationWeighted(),
    ],
)
def test_an_algorithm_that_needs_its_client_half_says_so(algorithm: fedloom.Algorithm) -> None:
    with pytest.raises(InputError, match=r"fedloom flower app.*own ClientApps: .*fedadam.*fedavg.*fedprox"):
        strategy(algorithm)


def test_a_setting_that_flower_does_not_have() -> None:
    with pytest.raises(InputError, match="fraction_fit"):
        strategy(fedloom.FedAvg(), fraction_fit=0.1)


HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000000,), }".ljust(117) + b"\n"


@pytest.mark.parametrize("data", [b"\x93NUMPY\x01\x00\x06\x00{'a':(", b"\x93NUMPY\x01\x00\x76\x00" + HEADER])
def test_bytes_that_numpy_chokes_on_are_left_out_too(data: bytes) -> None:
    made = strategy(fedloom.FedAvg())
    begin(made, arrays(w=[0.0, 0.0]))
    bad = reply(3, ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", data)}))
    found, _ = made.aggregate_train(1, [reply(5, arrays(w=[1.0, 2.0])), bad])
    assert values(found) == {"w": [1.0, 2.0]}
    assert [node for node, _ in made.rejected] == [3]


@pytest.mark.parametrize("other", [{}, {"accuracy": [0.5, 0.5]}])
def test_a_metric_that_not_all_nodes_send_alike_has_no_mean(other: dict[str, Any]) -> None:
    made = strategy(fedloom.FedAvg())
    begin(made, arrays(w=[0.0]))
    sent = [reply(3, arrays(w=[1.0]), 1, loss=1.0, accuracy=0.5), reply(5, arrays(w=[1.0]), 3, loss=2.0, **other)]
    found, metrics = made.aggregate_train(1, sent)
    assert values(found) == {"w": [1.0]}
    assert dict(metrics) == {"loss": 1.75}


def test_arrays_of_another_model_are_refused() -> None:
    made = strategy(fedloom.FedAvgM(server_lr=0.5), nn.Linear(2, 2))
    with pytest.raises(InputError, match="do not match the model of the strategy: only one of them has 'bias'"):
        begin(made, arrays(w=[0.0]))


@pytest.mark.parametrize("settings", [{"norm_bound": -1.0}, {"norm_bound": float("nan")}, {"weight_cap": 0.0}])
def test_a_bound_that_nothing_can_keep_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(settings))} must be more than 0"):
        strategy(fedloom.FedAvg(), **settings)


def test_a_class_is_not_an_algorithm() -> None:
    with pytest.raises(InputError, match=r"needs an algorithm, such as fedloom\.FedAvg\(\)"):
        strategy(fedloom.FedAvg)  # type: ignore[arg-type]


def test_frozen_parameters_do_not_drift() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    record = ArrayRecord({name: Array(leaf.numpy()) for name, leaf in net.state_dict().items()})
    made = strategy(fedloom.FedAvg(), net)
    begin(made, record)
    found = made.aggregate_train(1, [reply(node, record, 7 * node) for node in NODES])[0]
    for name in ("0.weight", "0.bias"):
        assert found[name].numpy().tobytes() == record[name].numpy().tobytes()
