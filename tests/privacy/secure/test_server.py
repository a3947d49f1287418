"""The server keeps the sets of each stage, gives up when too few are left, and notices wrong shares."""

import numpy as np
import pytest

from fedloom.errors import RoundAbandoned
from fedloom.privacy.secure.server import SecureServer
from tests.privacy.secure.helpers import Table, session

ONES = {client: np.ones(4, np.uint32) for client in range(6)}


def answers(table: Table) -> dict:  # type: ignore[type-arg]
    return {client: table.clients[client].unmask(table.server.signatures) for client in table.server.survivors}


def test_the_sum_is_that_of_the_clients_whose_masked_values_arrived() -> None:
    table = Table(session(6, 4)).confirmed(ONES, lost=(1, 3))
    total = table.server.total(answers(table))
    assert total.tolist() == [4, 4, 4, 4]


def test_a_masked_value_that_comes_late_twice_or_uninvited_is_refused() -> None:
    table = Table(session()).shared()
    with pytest.raises(ValueError, match="uninvited"):
        table.server.add_masked(9, ONES[0])
    table.server.add_masked(0, ONES[0])
    with pytest.raises(ValueError, match="twice"):
        table.server.add_masked(0, ONES[0])
    with pytest.raises(ValueError, match="another length or another kind"):
        table.server.add_masked(1, np.ones(5, np.uint32))
    table.server.add_masked(1, ONES[1])
    table.server.add_masked(2, ONES[2])
    table.server.close_mask()
    with pytest.raises(ValueError, match="too late"):
        table.server.add_masked(3, ONES[3])


def test_too_few_clients_at_a_stage_abandon_the_round() -> None:
    server = SecureServer(session(4, 3))
    with pytest.raises(RoundAbandoned, match=r"Round 1: 0 of 4 clients sent their keys, .* needs 3"):
        server.close_advertise([])


def test_a_client_that_did_not_share_with_everyone_has_left() -> None:
    table = Table(session(5, 3)).advertised()
    advertised = list(table.server.advertised.values())
    sent = {number: client.share(advertised) for number, client in table.clients.items()}
    del sent[2][0]
    table.server.close_share(sent)
    assert table.server.sharers == {0, 1, 3, 4}


def test_wrong_shares_abandon_the_round() -> None:
    table = Table(session(5, 4)).confirmed(ONES, lost=(4,))
    given = answers(table)
    given[0][1], given[0][2] = given[0][2], given[0][1]
    with pytest.raises(RoundAbandoned, match=r"shares of the mask of '1' do not belong together"):
        table.server.total(given)


@pytest.mark.parametrize("liar", [0, 2, 4])
def test_one_client_with_wrong_shares_is_found_and_the_sum_does_without_them(liar: int) -> None:
    table = Table(session(6, 4)).confirmed(ONES, lost=(5,))
    given = answers(table)
    given[liar] = {peer: bytes(len(share) - 1) + b"\x01" for peer, share in given[liar].items()}
    assert table.server.total(given).tolist() == [5, 5, 5, 5]
    assert table.server.wrong == ({liar} if liar < 4 else set())  # four shares are enough, and the last was not read


def test_a_client_whose_own_shares_do_not_belong_together_costs_the_round() -> None:
    table = Table(session(6, 4)).confirmed(ONES)
    table.server.name = {3: "kerry"}.__getitem__
    given = answers(table)
    for number, shares in given.items():
        shares[3] = number.to_bytes(len(shares[3]), "big")[::-1]
    with pytest.raises(RoundAbandoned, match=r"shares of the mask of 'kerry' do not belong together. It sent"):
        table.server.total(given)


def test_a_seed_in_place_of_a_mask_key_abandons_the_round() -> None:
    table = Table(session(5, 3)).confirmed(ONES, lost=(4,))
    for client in range(4):
        half = len(table.clients[client]._held[4]) // 2
        table.clients[client]._held[4] = table.clients[client]._held[4][:half] * 2
    with pytest.raises(RoundAbandoned, match="shares of the mask key of '4' are wrong"):
        table.server.total(answers(table))


def test_too_few_shares_of_one_client_abandon_the_round() -> None:
    table = Table(session(5, 4)).confirmed(ONES, lost=(4,))
    given = answers(table)
    del given[0][4]
    with pytest.raises(RoundAbandoned, match="3 clients gave a share of the mask of '4', and 4 are needed"):
        table.server.total(given)
