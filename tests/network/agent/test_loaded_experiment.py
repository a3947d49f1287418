"""Loading an experiment at a site."""

from __future__ import annotations

import torch

from fedloom.network.agent.loaded_experiment import HostedClients
from tests.conftest import federation as some_clients


def test_hosted_clients_are_found_by_their_numbers_in_the_run() -> None:
    site = some_clients((12, 9))
    hosted = HostedClients.of(site, {7: 1, 3: 0}, population=10)
    assert hosted.clients == 10
    assert hosted.name(7) == site.name(1)
    assert hosted.counts([7, 3], "train").tolist() == site.counts([1, 0], "train").tolist()
    assert torch.equal(hosted.indices(7, "test"), site.indices(1, "test"))
