"""Small sessions of secure aggregation."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.privacy.secure.client import SecureClient
from fedloom.privacy.secure.server import SecureServer
from fedloom.privacy.secure.session import Floors, Session


def session(clients: int = 4, threshold: int = 3, **changes: object) -> Session:
    values = {"run": "run", "round": 1, "call": 0, "attempt": 1, "clients": clients, "threshold": threshold}
    return Session(**{**values, "config": "ring", **changes})  # type: ignore[arg-type]


class Table:
    """A server and its clients, which tests drive stage by stage."""

    def __init__(self, agreed: Session, floors: Floors = Floors(), members: int | None = None) -> None:
        self.session = agreed
        self.signers = {client: Ed25519PrivateKey.generate() for client in range(members or agreed.clients)}
        self.roster = {client: key.public_key().public_bytes_raw() for client, key in self.signers.items()}
        self.clients = {client: self.client(client, floors) for client in self.signers}
        self.server = SecureServer(agreed)

    def client(self, number: int, floors: Floors = Floors()) -> SecureClient:
        return SecureClient(self.session, number, self.signers[number].sign, self.roster, floors)

    def advertised(self) -> "Table":
        self.server.close_advertise([client.advertise() for client in self.clients.values()])
        return self

    def shared(self) -> "Table":
        keys = list(self.advertised().server.advertised.values())
        self.server.close_share({number: client.share(keys) for number, client in self.clients.items()})
        return self

    def masked(self, vectors: dict, lost: tuple[int, ...] = ()) -> "Table":  # type: ignore[type-arg]
        self.shared()
        for number, client in self.clients.items():
            if number not in lost:
                masked = client.mask(vectors[number], self.server.sharers, self.server.ciphertexts_for(number))
                self.server.add_masked(number, masked)
        self.server.close_mask()
        return self

    def confirmed(self, vectors: dict, lost: tuple[int, ...] = ()) -> "Table":  # type: ignore[type-arg]
        self.masked(vectors, lost)
        survivors = self.server.survivors
        self.server.close_confirm({number: self.clients[number].confirm(survivors) for number in survivors})
        return self
