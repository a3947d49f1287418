"""What a run over the network leaves out, and how many clients it invites."""

from __future__ import annotations

import pytest

from fedloom.federation.sampling import Sampling
from fedloom.network.coordinator.network_run import federated, widened


def test_over_selection_invites_extra_clients() -> None:
    assert widened(Sampling(count=10, over_select=0.25), 100).size(100) == 13
    assert widened(Sampling(count=10, over_select=0.25), 11).size(11) == 11
    assert widened(Sampling(fraction=0.1, sampling="poisson", over_select=0.5), 100).fraction == pytest.approx(0.15)
    assert widened(Sampling(count=10), 100).size(100) == 10


def test_what_needs_all_data_in_one_place_is_left_out_with_a_note() -> None:
    from fedloom.errors import InputError
    from fedloom.experiment.experiment_file import parse

    experiment, notes = federated(parse({"algorithm": {"fedavg": {}, "pooled": {}}, "evaluate": {"universal": True}}))
    assert list(experiment.algorithm) == ["fedavg"]
    assert not experiment.evaluate.universal
    assert len(notes) == 2
    with pytest.raises(InputError, match="nothing to serve"):
        federated(parse({"algorithm": {"pooled": {}}}))
