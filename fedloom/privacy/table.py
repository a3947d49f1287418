"""The table [privacy] of an experiment file: which protections a run has."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Strict, model_validator

from fedloom.errors import InputError
from fedloom.record import Positive, Record, Share

COLLUDERS = 0.1  # the share of clients that secure sums of more than 100 of them assume, too
SITES_THRESHOLD = 0.67  # what sites require unless their policies say otherwise: two thirds protect from a lying server
Probability = Annotated[float, Strict(), Gt(0), Lt(1)]  # with 1, everything may be published


class SecureTable(Record):
    """[privacy] secure_aggregation: the server learns the sum of the clients' updates, and no single one."""

    threshold: Annotated[float, Strict(), Gt(0.5), Le(1)] = SITES_THRESHOLD
    """The share of a round's clients that must stay until its end. With fewer, the round is abandoned."""
    min_clients: Annotated[int, Strict(), Gt(1)] = 3
    """The fewest clients in a sum."""
    range: Positive | dict[str, Positive] = 4.0
    """The largest number in a change, for all groups of an update or for each. A client sends no larger one."""
    bits: Literal["auto", 32, 64] = "auto"
    """The size of a masked number."""
    lost: tuple[Share, Share, Share, Share, Share] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """The probability that a client vanishes before each of the five stages: it advertises keys, shares secrets, masks
    its update, confirms who is in the sum, and helps to unmask it. Only in simulation.
    """

    def needed(self, clients: int) -> int:
        """Return how many of a round's clients must stay until its end.

        >>> [SecureTable().needed(clients) for clients in (3, 10, 100)]
        [3, 7, 67]
        """
        return max(ceil(round(self.threshold * clients, 9)), clients // 2 + 1, self.min_clients)


class DpTable(Record):
    """[privacy] dp: differential privacy of clients. Two runs that differ in one client are hard to tell apart."""

    epsilon: Positive | None = None
    """The ε to spend in all planned rounds. The noise follows from it."""
    delta: Probability = 1e-5
    """The probability δ that the guarantee fails."""
    clip: Positive | Literal["adaptive"] = "adaptive"
    """The largest norm of a client's change. Longer ones are scaled down. `adaptive` follows their median."""
    noise: Literal["server", "distributed", "local"] = "server"
    """Who adds the noise: the server, all clients together under secure aggregation, or each client for itself."""
    correlated: bool = False
    """Add noise that later rounds partly take back (DP-FTRL), for cohorts that are not secret. Clients take turns."""
    colluders: Annotated[float, Strict(), Ge(0), Lt(1)] | None = None
    """With distributed noise, the share of a round's clients, rounded up, that may work with the server: they add no
    noise, or tell the server theirs. The others add more. By default, 0.1.
    """
    noise_multiplier: Positive | None = None
    """The noise's standard deviation as a multiple of the clip. With `epsilon` too, the run stops when it is spent."""

    @model_validator(mode="after")
    def _says_how_much(self) -> DpTable:
        if self.epsilon is None and self.noise_multiplier is None:
            raise InputError("[privacy] dp needs an epsilon, such as 8.0, or a noise_multiplier.")
        if self.colluders is not None and self.noise != "distributed":
            raise InputError('[privacy] dp colluders is about noise = "distributed". Leave it out.')
        if self.correlated and (self.noise != "server" or self.clip == "adaptive"):
            raise InputError('[privacy] dp correlated = true needs noise = "server" and a number as clip.')
        if self.correlated and self.epsilon is not None and self.noise_multiplier is not None:
            raise InputError("[privacy] dp correlated = true takes an epsilon or a noise_multiplier, not both.")
        if self.noise == "local" and self.clip == "adaptive":
            raise InputError('[privacy] dp noise = "local" needs a number as clip: nobody sees how long changes are.')
        return self

    def most_colluders(self, clients: int) -> int:
        """Return how many of a round's clients may work with the server.

        >>> [DpTable(epsilon=1.0).most_colluders(clients) for clients in (3, 10, 100)]
        [1, 1, 10]
        """
        return ceil(round(self.colluder_share * clients, 9))

    @property
    def colluder_share(self) -> float:
        """The share of a round's clients that may work with the server."""
        return COLLUDERS if self.colluders is None else self.colluders


class ExampleTable(Record):
    """[privacy] example_dp: differential privacy of examples. Each client adds noise to its own gradients."""

    epsilon: Positive = 8.0
    """The ε that each client spends in all planned rounds."""
    delta: Probability = 1e-5
    """The probability δ that the guarantee fails."""
    max_grad_norm: Positive = 1.0
    """The largest norm of one example's gradient. Longer ones are scaled down."""


class PrivacyTable(Record):
    """[privacy]: what the server, and people who see the model, cannot learn about a client. By default, nothing."""

    secure_aggregation: SecureTable | None = None
    """Let the server learn only sums over clients."""
    dp: DpTable | None = None
    """Hide whether a client took part."""
    example_dp: ExampleTable | None = None
    """Hide whether a client has some example."""

    @model_validator(mode="after")
    def _masks_shares_of_noise(self) -> PrivacyTable:
        if self.has_distributed_noise and self.secure_aggregation is None:
            raise InputError(
                '[privacy] dp noise = "distributed" needs secure_aggregation: a single client\'s noise protects little.'
            )
        return self

    @property
    def on(self) -> bool:
        """Whether the answers of clients pass through a protection."""
        return self.secure_aggregation is not None or (self.dp is not None and not self.has_local_noise)

    @property
    def hides_metrics(self) -> bool:
        """Whether no client's metrics leave it on a network, because neither mask nor noise covers them."""
        return self.secure_aggregation is not None or self.dp is not None or self.example_dp is not None

    @property
    def has_local_noise(self) -> bool:
        """Whether each client adds noise to its own answer."""
        return self.dp is not None and self.dp.noise == "local"

    @property
    def has_distributed_noise(self) -> bool:
        """Whether the clients of a secure sum add noise together."""
        return self.dp is not None and self.dp.noise == "distributed"
