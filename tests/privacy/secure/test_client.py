"""A client refuses a server that lies, and says why; after that it answers nothing more."""

from dataclasses import replace

import numpy as np
import pytest

from fedloom.privacy.secure import shamir
from fedloom.privacy.secure.client import SecureClient
from fedloom.privacy.secure.session import Advertisement, Floors, Refusal
from tests.privacy.secure.helpers import Table, session

ONES = {client: np.ones(4, np.uint32) for client in range(6)}


def keys(table: Table) -> list[Advertisement]:
    return list(table.advertised().server.advertised.values())


def holds_a_secret(client: SecureClient) -> bool:
    return bool(client._mask_private or client._channel_private or client._seed or client._held or client._channels)


# --- the threshold and the floors


def test_a_server_cannot_lower_the_threshold() -> None:
    with pytest.raises(Refusal, match=r"at least 5 of 6 clients must be needed .* threshold of 4"):
        Table(session(6, 4), Floors(3, 0.67))


def test_a_server_cannot_lower_the_threshold_after_keys_were_made() -> None:
    """Everything that was agreed is signed with the keys."""
    table = Table(session(4, 3))
    lowered = Table(session(4, 3, round=1, config="wider"))
    lowered.signers, lowered.roster = table.signers, table.roster
    advertised = keys(table)
    victim = SecureClient(lowered.session, 0, table.signers[0].sign, table.roster)
    mine = victim.advertise()
    with pytest.raises(Refusal, match="keys of client 1 are not signed by it for this attempt"):
        victim.share([mine, *advertised[1:]])


# --- the roster


def test_a_server_cannot_forge_the_keys_of_a_client() -> None:
    table = Table(session())
    advertised = keys(table)
    forged = replace(advertised[2], mask_key=bytes(31) + b"\x09")
    with pytest.raises(Refusal, match="keys of client 2 are not signed by it"):
        table.clients[0].share([*advertised[:2], forged, advertised[3]])


def test_a_server_cannot_invent_a_client() -> None:
    table, stranger = Table(session(5, 3)), 4
    del table.roster[stranger]
    advertised = keys(table)
    with pytest.raises(Refusal, match="client 4 is not known here"):
        table.clients[0].share(advertised)


def test_a_server_cannot_leave_our_keys_out_or_change_them() -> None:
    table = Table(session())
    advertised = keys(table)
    with pytest.raises(Refusal, match="our own keys are not in the roster, or were changed"):
        table.clients[0].share([replace(advertised[0], mask_key=bytes(32)), *advertised[1:]])
    with pytest.raises(Refusal, match="our own keys"):
        table.clients[1].share([advertised[0], *advertised[2:]])


def test_a_server_cannot_name_a_client_or_a_key_twice() -> None:
    table = Table(session())
    advertised = keys(table)
    with pytest.raises(Refusal, match="a client is in the roster twice"):
        table.clients[0].share([*advertised[:3], advertised[2]])
    copied = replace(advertised[3], channel_key=advertised[2].channel_key)
    with pytest.raises(Refusal, match="a key is in the roster twice"):
        table.clients[1].share([*advertised[:3], copied])


def test_a_server_cannot_use_the_roster_of_more_clients_than_were_invited() -> None:
    table = Table(session(4, 3), members=5)
    with pytest.raises(Refusal, match="roster has 5 clients, and 4 were invited"):
        table.clients[0].share(keys(table))


def test_a_server_cannot_go_on_with_too_few_keys() -> None:
    table = Table(session())
    advertised = keys(table)
    with pytest.raises(Refusal, match="2 clients advertised keys, and 3 are needed"):
        table.clients[0].share(advertised[:2])


# --- keys and sessions are used once


def test_keys_of_an_earlier_attempt_are_refused() -> None:
    before = Table(session(attempt=1))
    old = keys(before)
    now = Table(session(attempt=2))
    now.signers, now.roster = before.signers, before.roster
    victim = SecureClient(now.session, 0, before.signers[0].sign, before.roster)
    with pytest.raises(Refusal, match="were made for another one"):
        victim.share([victim.advertise(), *old[1:]])


def test_every_session_has_new_keys() -> None:
    table = Table(session())
    first, second = (table.client(0).advertise() for _ in range(2))
    assert len({first.mask_key, first.channel_key, second.mask_key, second.channel_key}) == 4


def test_a_replayed_session_is_refused_at_every_stage() -> None:
    table = Table(session()).confirmed(ONES)
    client, server = table.clients[0], table.server
    client.unmask(server.signatures)
    replays = {
        "advertise": client.advertise,
        "share": lambda: client.share(list(server.advertised.values())),
        "mask": lambda: client.mask(ONES[0], server.sharers, server.ciphertexts_for(0)),
        "confirm": lambda: client.confirm(server.survivors),
        "unmask": lambda: client.unmask(server.signatures),
    }
    for stage, replay in replays.items():
        with pytest.raises(Refusal, match=f"the server asks for '{stage}'.*each stage runs once"):
            replay()


def test_ciphertexts_of_another_session_are_refused() -> None:
    table = Table(session()).shared()
    other = Table(session()).shared()
    with pytest.raises(Refusal, match="the shares of client 1 were changed on their way"):
        table.clients[0].mask(ONES[0], table.server.sharers, other.server.ciphertexts_for(0))


def test_a_ciphertext_for_another_client_is_refused() -> None:
    table = Table(session()).shared()
    theirs = {**table.server.ciphertexts_for(0), 1: table.server.ciphertexts_for(2)[1]}
    with pytest.raises(Refusal, match="the shares of client 1 were changed"):
        table.clients[0].mask(ONES[0], table.server.sharers, theirs)


# --- who is in the sum


def test_a_server_cannot_leave_us_or_too_many_out_when_we_mask() -> None:
    table = Table(session()).shared()
    mine = table.server.ciphertexts_for(0)
    with pytest.raises(Refusal, match="2 clients shared their secrets, and 3 are needed"):
        table.clients[0].mask(ONES[0], [0, 1], {1: mine[1]})
    with pytest.raises(Refusal, match="we are not among the clients that shared"):
        table.clients[1].mask(ONES[1], [0, 2, 3], {})
    with pytest.raises(Refusal, match="are not those of the neighbours"):
        table.clients[2].mask(ONES[2], [0, 1, 2, 3], {0: b""})
    with pytest.raises(Refusal, match=r"client 9 is among the clients that shared .* had left before"):
        table.clients[3].mask(ONES[3], [0, 1, 2, 3, 9], {})


def test_a_server_cannot_take_away_all_our_neighbours_in_a_sparse_graph() -> None:
    table = Table(session(300, 201)).advertised()
    advertised = list(table.server.advertised.values())
    victim = table.clients[0]
    victim.share(advertised)
    others = set(table.clients) - set(victim.graph.neighbours(0))
    assert len(others) > 201
    with pytest.raises(Refusal, match="0 clients that hold our shares shared their secrets"):
        victim.mask(np.ones(4, np.uint32), others, {})


def test_a_server_cannot_show_a_sum_without_us_or_with_a_client_that_left() -> None:
    table = Table(session(5, 3))
    table.advertised()
    advertised = list(table.server.advertised.values())
    table.server.close_share({number: table.clients[number].share(advertised) for number in (0, 1, 2, 3)})
    for number in (0, 1, 2, 3):
        table.clients[number].mask(ONES[number], table.server.sharers, table.server.ciphertexts_for(number))
    with pytest.raises(Refusal, match="we are not among the clients that sent a masked value"):
        table.clients[0].confirm([1, 2, 3])
    with pytest.raises(Refusal, match="client 4 is among the clients that sent a masked value, and it had left"):
        table.clients[1].confirm([0, 1, 2, 3, 4])
    with pytest.raises(Refusal, match="2 clients sent a masked value, and 3 are needed"):
        table.clients[2].confirm([2, 3])


def test_a_server_that_shows_two_survivor_sets_gets_no_share() -> None:
    table = Table(session(6, 4)).masked(ONES)
    one, other = range(6), range(5)
    signatures = {client: table.clients[client].confirm(one) for client in (0, 1, 5)}
    signatures |= {client: table.clients[client].confirm(other) for client in (2, 3, 4)}
    for client in range(6):
        with pytest.raises(Refusal, match="may have shown two different sets, or models"):
            table.clients[client].unmask(signatures)


def test_a_server_that_shows_two_survivor_sets_has_too_few_signatures_under_each() -> None:
    table = Table(session(6, 4)).masked(ONES)
    first = {client: table.clients[client].confirm(range(6)) for client in (0, 1, 5)}
    second = {client: table.clients[client].confirm(range(5)) for client in (2, 3, 4)}
    for half in (first, second):
        for client in half:
            with pytest.raises(Refusal, match="3 clients confirmed who is in the sum, and 4 are needed"):
                table.clients[client].unmask(half)


def test_a_signature_counts_for_one_client_of_an_agent_that_hosts_several() -> None:
    """All clients of an agent sign with its key, so a server could count one confirmation several times."""
    table = Table(session(6, 4))
    for number in (1, 2, 3):
        table.signers[number], table.roster[number] = table.signers[0], table.roster[0]
    table.clients = {number: table.client(number) for number in table.clients}
    table.masked(ONES)
    signatures = {client: table.clients[client].confirm(range(6)) for client in (0, 4, 5)}
    with pytest.raises(Refusal, match="signature of client 1 is not under the set"):
        table.clients[0].unmask({**signatures, 1: signatures[0]})


def test_a_server_that_asks_clients_about_different_models_gets_no_share() -> None:
    table = Table(session(4, 3)).shared()
    for number, client in table.clients.items():
        model = b"another model" if number == 2 else b"the model"
        client.mask(ONES[number], table.server.sharers, table.server.ciphertexts_for(number), model)
    signatures = {number: client.confirm(range(4)) for number, client in table.clients.items()}
    for number, client in table.clients.items():
        with pytest.raises(Refusal, match=f"signature of client {0 if number == 2 else 2} .* or models"):
            client.unmask(signatures)


def test_the_signature_of_a_client_that_is_not_in_the_sum_does_not_count() -> None:
    table = Table(session(5, 3)).masked(ONES, lost=(4,))
    signatures = {client: table.clients[client].confirm(table.server.survivors) for client in range(4)}
    with pytest.raises(Refusal, match="signature of client 4"):
        table.clients[0].unmask({**signatures, 4: signatures[0]})


# --- exactly one share of each peer


def test_a_client_gives_one_share_of_each_peer_and_never_both() -> None:
    table = Table(session(5, 3)).confirmed(ONES, lost=(4,))
    client = table.clients[0]
    held = dict(client._held)
    given = client.unmask(table.server.signatures)
    half = shamir.SHARE_BYTES
    assert given.keys() == held.keys() == {0, 1, 2, 3, 4}
    assert all(given[peer] == held[peer][:half] for peer in range(4))
    assert given[4] == held[4][half:]


def test_nothing_is_given_for_a_client_that_left_before_it_shared() -> None:
    table = Table(session(5, 3)).advertised()
    advertised = list(table.server.advertised.values())
    table.server.close_share({number: table.clients[number].share(advertised) for number in range(4)})
    for number in range(4):
        masked = table.clients[number].mask(ONES[number], table.server.sharers, table.server.ciphertexts_for(number))
        table.server.add_masked(number, masked)
    table.server.close_mask()
    table.server.close_confirm({n: table.clients[n].confirm(table.server.survivors) for n in range(4)})
    assert table.clients[0].unmask(table.server.signatures).keys() == {0, 1, 2, 3}


def test_after_the_end_and_after_a_refusal_a_client_holds_no_secret() -> None:
    table = Table(session()).confirmed(ONES)
    table.clients[0].unmask(table.server.signatures)
    with pytest.raises(Refusal):
        table.clients[1].unmask({})
    assert not holds_a_secret(table.clients[0])
    assert not holds_a_secret(table.clients[1])
    with pytest.raises(Refusal, match="what follows is 'none'"):
        table.clients[1].unmask(table.server.signatures)


def test_the_own_secrets_are_erased_as_soon_as_the_value_is_masked() -> None:
    client = Table(session()).masked(ONES).clients[0]
    assert not (client._mask_private)
    assert not (client._channel_private)
    assert not (client._seed)
    assert not (client._channels)


def test_a_masked_value_looks_like_noise_even_if_the_value_is_zero() -> None:
    table = Table(session()).shared()
    masked = table.clients[0].mask(np.zeros(4096, np.uint32), table.server.sharers, table.server.ciphertexts_for(0))
    bits = np.unpackbits(masked.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.01
    assert len(np.unique(masked)) > 4000
