"""Secure aggregation in one cell: which experiments it protects, the session of a call, and its simulation."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError, RoundAbandoned, TrainingError
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.dp.noise import derive
from fedloom.privacy.secure.client import STAGES, SecureClient
from fedloom.privacy.secure.masks import PairMasksOnce, Vector
from fedloom.privacy.secure.ring import Ring, RingConfig
from fedloom.privacy.secure.server import SecureServer
from fedloom.privacy.secure.session import Floors, Refusal, Session
from fedloom.privacy.table import PrivacyTable, SecureTable
from fedloom.privacy.words import BOUND_WEIGHTS, called, one_place
from fedloom.tree import Groups, row
from fedloom.user_code import calls, defined_at

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.federation.sampling import Sampling


UNBOUNDED = 2**40  # more examples than any client has


def check_sums(algorithm: Algorithm, key: str, label: str = "") -> None:
    """Raise `InputError` if somebody sees more of an algorithm's clients than sums; `key` is the one of [privacy]."""
    peers = calls(type(algorithm), "exchange")
    if algorithm.linear and not peers and not calls(type(algorithm), "map"):
        return
    who = called(algorithm, label)
    start = f"[privacy] {key} protects sums over clients, and"
    if getattr(algorithm, "rule", None) is not None:
        raise InputError(f"{start} the rule of {who} judges each client's update. Leave out the rule, or {key}.")
    shown = f"shows the server the update or score of each client{defined_at(type(algorithm).round)}"
    if peers:
        shown = "has no sum at a server: clients see each other's weights"
    advice = (
        f"Use an algorithm that needs only sums, such as fedavg, or move {who} into a file of its own without {key}."
    )
    if peers and key == "dp":
        advice += (
            ' Among peers, only noise = "local" is possible, in which each client adds noise to its own weights, and '
            'only if the peers do not score each other (weights = "uniform" or "metropolis").'
        )
    raise InputError(f"{start} {who} {shown}. {advice}")


def check(
    table: SecureTable, algorithm: Algorithm, sampling: Sampling, population: int | None = None, label: str = ""
) -> None:
    """Raise `InputError` if secure aggregation cannot protect the clients of an experiment.

    `population` is the number of clients, if it is known already.
    """
    check_sums(algorithm, "secure_aggregation", label)
    who, start = called(algorithm, label), "[privacy] secure_aggregation"
    if algorithm.pooled:
        raise InputError(one_place("secure_aggregation", who))
    if not algorithm.sums_cover_all:
        raise InputError(
            f"{start} promises sums over at least {table.min_clients} clients, and {who} sums over some of a round's "
            "clients: such a sum could be that of a single client. Use an algorithm that sums over all of them, such "
            f"as fedavg, or move {who} into a file of its own without secure_aggregation."
        )
    if sampling.over_select:
        raise InputError(f"{start} cannot leave out clients that answer late: leave out [cohort] over_select.")
    weight_bound(algorithm, sampling, label)
    size = sampling.count if population is None else sampling.size(population)
    if size is not None and size < table.min_clients:
        raise InputError(
            f"{start} needs at least min_clients = {table.min_clients} clients in a round, and a round has {size}. "
            "Let more clients take part ([cohort] count or fraction), or set a smaller min_clients."
        )


def weight_bound(algorithm: Algorithm, sampling: Sampling, label: str = "") -> int:
    """Return the largest weight of a client: weights are part of the sum, so the ring must have room for them."""
    if algorithm.largest_weight(UNBOUNDED) <= 1:
        return 1
    bound = algorithm.largest_weight(sampling.max_examples or UNBOUNDED)
    if sampling.max_examples is None or not float(bound).is_integer():
        who = called(algorithm, label)
        why, advice = "weighs clients by examples", BOUND_WEIGHTS
        if not float(bound).is_integer():
            why = "weighs clients by other numbers than their examples"
            advice = f"Use another algorithm, such as fedavg, or move {who} into a file of its own."
        raise InputError(
            f"[privacy] secure_aggregation needs a bound on the weight of a client, and {who} {why}. {advice}"
        )
    return int(bound)


def ring_config(privacy: PrivacyTable, clients: int, weight_bound: int, noise: NoiseShare | None = None) -> RingConfig:
    """Return the ring for a call. Rounding leaves less of the clip: if the server adds noise, the ring has 64 bits.

    With noise of clients, the ring counts in units of the clip, so that 32 bits can suffice.
    """
    table = privacy.secure_aggregation
    assert table is not None
    fine = privacy.dp is not None and privacy.dp.noise == "server" and table.bits == "auto"
    return RingConfig(table.range, clients, weight_bound, 64 if fine else table.bits, noise)


@dataclass(frozen=True)
class SecureCall:
    """One call of one round: the session of its clients, and the ring of their updates."""

    session: Session
    config: RingConfig

    @staticmethod
    def of(table: SecureTable, config: RingConfig, run: str, round: int, call: int, attempt: int = 0) -> SecureCall:
        agreed = {name: value for name, value in asdict(config).items() if value is not None}
        text = json.dumps(agreed, sort_keys=True)
        threshold = table.needed(config.clients)
        return SecureCall(Session(run, round, call, attempt, config.clients, threshold, text), config)


@dataclass(frozen=True)
class SecureSum:
    """What the server learns from a call: weighted sums of changes, sums of weights, and whose they are."""

    sums: Groups
    weights: dict[str, Tensor]
    clients: tuple[int, ...]
    refused: dict[int, str]  # why clients sent nothing


class NobodySent(TrainingError):
    """Too few clients are left in a sum, because some refused to send their updates; `why` is one's reason."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


def simulate(
    table: SecureTable,
    call: SecureCall,
    ids: tuple[int, ...],
    answered: Sequence[int],
    stack: Groups,
    weights: Mapping[str, Tensor],
    bases: Groups,
    seed: int,
    secret: bytes = b"",
    name: Callable[[int], str] = str,
) -> SecureSum:
    """Run the protocol between all clients of a call in this process, some of which vanish.

    `stack` has the updates of those that `answered`. The others vanish before they mask one.
    With noise that clients add together, `secret` gives theirs: it must be another one for every stack.
    """
    if not stack:  # clients send nothing, so there is nothing to protect
        return SecureSum({}, {}, ids, {})
    refused: dict[int, str] = {}
    ring = Ring(call.config, {group: row(stacked, 0) for group, stacked in stack.items()})
    position = {client: number for number, client in enumerate(answered)}
    session = call.session

    def value(client: int) -> Vector:
        mine = {group: row(stacked, position[client]) for group, stacked in stack.items()}
        try:
            own = {group: float(w[position[client]]) for group, w in weights.items()}
            return ring.encode(mine, own, bases, derive(secret, client))
        except Refusal as why:
            refused[client] = f"{why} ({why.value})" if why.value else str(why)
            raise

    def lost(stage: str) -> list[int]:
        number = STAGES.index(stage)
        limit = table.lost[number] * 2**32
        drawn = keys.hashes(keys.key(seed, "lost", session.round, session.call, number), max(ids) + 1)
        return [client for client in ids if drawn[client] < limit or (stage == "mask" and client not in position)]

    try:
        total, survivors = secure_sum(session, ids, value, lost, Floors(table.min_clients, table.threshold), name)
    except RoundAbandoned as error:
        if refused:
            client, why = min(refused.items())
            raise NobodySent(
                f"{error} {len(refused)} clients sent nothing, such as '{name(client)}': {why}.", why
            ) from None
        raise
    clients = tuple(client for client in ids if client in survivors)
    sums, summed = ring.sums(total, len(clients))
    return SecureSum(sums, summed, clients, refused)


def secure_sum(
    session: Session,
    ids: Iterable[int],
    value: Callable[[int], Vector],
    lost: Callable[[str], Collection[int]] = lambda stage: (),
    floors: Floors = Floors(),
    name: Callable[[int], str] = str,
) -> tuple[Vector, frozenset[int]]:
    """Run every stage between all clients; return the sum and the clients in it.

    `value` returns a client's value when it masks it; a client that refuses to give one is lost. `lost` names the
    clients that do not answer in a stage; they do not come back. `RoundAbandoned` says that too few are left, and
    calls clients by their `name`.
    """
    signers = {client: Ed25519PrivateKey.generate() for client in ids}
    roster = {client: signer.public_key().public_bytes_raw() for client, signer in signers.items()}
    masks = PairMasksOnce()
    server = SecureServer(session, name)
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
