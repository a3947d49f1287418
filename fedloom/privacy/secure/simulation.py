"""All clients and the server of a secure sum in one process, with clients that vanish at any stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.privacy.secure.client import SecureClient
from fedloom.privacy.secure.masks import PairMasksOnce, Vector
from fedloom.privacy.secure.server import SecureServer
from fedloom.privacy.secure.session import Floors, Refusal, Session


def secure_sum(
    session: Session,
    ids: Iterable[int],
    value: Callable[[int], Vector],
    lost: Callable[[str], Collection[int]] = lambda stage: (),
    floors: Floors = Floors(),
) -> tuple[Vector, frozenset[int]]:
    """Run every stage between all clients; return the sum and the clients in it.

    `value` returns a client's value when it masks it; a client that refuses to give one is lost. `lost` names the
    clients that do not answer in a stage; they do not come back. `RoundAbandoned` says that too few are left.
    """
    signers = {client: Ed25519PrivateKey.generate() for client in ids}
    roster = {client: signer.public_key().public_bytes_raw() for client, signer in signers.items()}
    masks = PairMasksOnce()
    server = SecureServer(session)
    if len(signers) < session.threshold:
        server.close_advertise([])
    clients = {
        client: SecureClient(session, client, signer.sign, roster, floors, masks) for client, signer in signers.items()
    }

    def staying(stage: str) -> dict[int, SecureClient]:
        for client in lost(stage):
            clients.pop(client, None)
        return clients

    server.close_advertise([client.advertise() for client in staying("advertise").values()])
    advertised = list(server.advertised.values())
    server.close_share({number: client.share(advertised) for number, client in staying("share").items()})
    for number, client in list(staying("mask").items()):
        try:
            own = value(number)
        except Refusal:
            del clients[number]
            continue
        server.add_masked(number, client.mask(own, server.sharers, server.ciphertexts_for(number)))
    server.close_mask()
    server.close_confirm({number: client.confirm(server.survivors) for number, client in staying("confirm").items()})
    answers = {number: client.unmask(server.signatures) for number, client in staying("unmask").items()}
    return server.total(answers), server.survivors
