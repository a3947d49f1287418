"""Says in plain words which protections an experiment has, and which it lacks: for `fedloom check` and the report."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.privacy.table import PrivacyTable

ADJACENCY = "two runs that differ in one client, added or removed"


def has(table: PrivacyTable, cohort: int | None = None) -> Iterator[str]:
    """Yield a sentence for each protection; `cohort` is the number of clients in a round, if it is known."""
    secure, dp, example = table.secure_aggregation, table.dp, table.example_dp
    if secure is not None:
        fewest = secure.min_clients
        yield f"Secure aggregation: the server sees sums over at least {fewest} clients, and no single update."
        if cohort is not None:
            needed = secure.needed(cohort)
            lost = max(cohort - needed, 0)
            yield (
                f"Of {cohort} clients in a round, {needed} must stay until its end: "
                f"{lost or 'none'} may be lost, otherwise the round is abandoned."
            )
    if dp is not None:
        spent = f"ε = {dp.epsilon:g}" if dp.epsilon is not None else f"noise multiplier {dp.noise_multiplier or 0:g}"
        who = {"server": "the server", "distributed": "all clients together", "local": "each client"}[dp.noise]
        yield f"Differential privacy of clients: {spent}, δ = {dp.delta:g}, for {ADJACENCY}. Noise is added by {who}."
    if example is not None:
        yield (
            f"Differential privacy of examples: each client spends ε = {example.epsilon:g}, δ = {example.delta:g}, for "
            "two data sets that differ in one of its examples."
        )


def lacks(table: PrivacyTable) -> Iterator[str]:
    """Yield a sentence for each protection that is missing, and what that means."""
    if table.secure_aggregation is None:
        yield "No secure aggregation: on a network, the coordinator can read each client's update."
    if table.dp is None and table.example_dp is None:
        yield "No differential privacy: nothing limits what the model tells about the data it was trained on."
    elif table.dp is not None and table.dp.noise == "server":
        yield "The server adds the noise: clients must trust it to do so."
