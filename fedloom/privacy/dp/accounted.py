"""The numbers behind an ε, with which another accountant can compute it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.at_client import LocalNoise
from fedloom.privacy.dp.example_level import ExamplePrivacy
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import PrivacyTable
from fedloom.training.settings import Training

if TYPE_CHECKING:
    from fedloom.federation.sampling import Sampling

# by kind, what an accountant must know besides the three numbers: of the noise, of the cohorts, and how to compute
_ASSUMED = {
    "replace_epsilon": (
        "",
        " without replacement (one replaced client moves the sum by up to two clips)",
        ", by Rényi accounting (RDP)",
    ),
    "example_epsilon": (
        "",
        "",
        ": those of the client with the fewest training examples. Clients with more draw a smaller share of them and "
        "add less noise, for the same ε",
    ),
    "distributed_epsilon": (
        " of a sum of discrete Gaussians",
        "",
        ", by Rényi accounting (RDP) as for one Gaussian, where a client's change is replaced by zero",
    ),
}


@dataclass(frozen=True)
class Accounted:
    """Equal releases, and what they cost together."""

    kind: str  # of ε, as in a round's record
    epsilon: float
    delta: float
    noise_multiplier: float | None = None  # earlier versions kept only ε
    sampling_rate: float | None = None
    steps: int | None = None
    algorithm: str = ""  # the label, if others spend something else

    @staticmethod
    def of(kind: str, mechanism: Mechanism, steps: int, delta: float, algorithm: str = "") -> Accounted:
        """Return what equal releases cost."""
        spent = epsilon({mechanism: steps}, delta).value
        return Accounted(kind, spent, delta, mechanism.noise_multiplier, mechanism.q, steps, algorithm)

    @property
    def words(self) -> str:
        """The numbers behind ε and δ, as far as they are known."""
        if self.steps is None:
            return ""
        noise, drawn, how = _ASSUMED.get(self.kind, ("", "", ""))
        steps = f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        multiplied = f"noise multiplier {self.noise_multiplier:.6g}{noise}"
        return f"{multiplied}, sampling rate {self.sampling_rate:.6g}{drawn}, {steps}{how}"

    def __str__(self) -> str:
        who = f"{self.algorithm}: " if self.algorithm else ""
        return f"{who}ε = {self.epsilon:.3g} at δ = {self.delta:g} follows from {self.words}."


def planned(
    table: PrivacyTable,
    sampling: Sampling,
    clients: int,
    fewest: int,
    rounds: int,
    training: Mapping[str, Training],
) -> Iterator[Accounted]:
    """Yield what all rounds cost.

    Of examples, it is what the client with the `fewest` training examples spends.
    """
    if table.dp is not None and rounds:
        if table.has_local_noise:
            local = LocalNoise(table.dp, rounds, b"").mechanism
            yield Accounted.of("local_epsilon", local, rounds, table.dp.delta)
        elif (server := Protection(table, sampling, clients, rounds).dp) is not None:
            steps = 1 if table.dp.correlated else rounds
            yield Accounted.of(server.kind, server.mechanism, steps, table.dp.delta)
    if table.example_dp is not None and rounds:
        for label, settings in training.items():
            found = ExamplePrivacy(table.example_dp, rounds, b"").steps(max(fewest, 1), settings)
            steps = found.count * rounds
            yield Accounted.of("example_epsilon", found.mechanism, steps, table.example_dp.delta, label)
