"""What left the clients in a run, and which protections stood in the way: a section of the report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fedloom.errors import FedloomError
from fedloom.privacy.table import PrivacyTable
from fedloom.privacy.words import EPSILONS, has, lacks, outside
from fedloom.results.run_data import RunData
from fedloom.results.table import show

NETWORK = "network"  # the folder of a coordinator


def what_left(run: RunData, labels: Collection[str] | None = None) -> list[str]:
    """Return the sentences of the section, about all algorithms or some."""
    about = run if labels is None else run.of_algorithms(labels)
    try:
        table = PrivacyTable(**(run.description.get("privacy") or {}))
    except FedloomError as error:  # of a later version
        return [f"This version cannot read the run's [privacy]: {error}"]
    # all algorithms trained on the same data, so what the others spent counts for its people, too
    claimed = [*_has(run, table), *_spent(run, table), *outside(table, run.description.get("data"), run.is_network)]
    sent = [_sent(run, label) for label in about.labels]
    sends = not any(sent) or any(map(any, sent))
    return [*_seen(about, table), *_prepared(run), *_bytes(about), *claimed, *lacks(table, sends)]


def not_evaluated(run: RunData) -> str:
    """Why a run on a network has no numbers of clients, if its protections are the reason; otherwise nothing."""
    privacy = run.description.get("privacy") or {}
    if not run.is_network or not privacy:
        return ""
    protection = "secure aggregation" if "secure_aggregation" in privacy else "differential privacy"
    return f"was not evaluated: under {protection} nothing is measured at clients"


def _seen(run: RunData, table: PrivacyTable) -> Iterator[str]:
    real = (run.folder / NETWORK).is_dir()
    if not real:
        yield "This was a simulation: nothing left a machine. What follows is what would leave a client on a network."
    peers = [label for label in run.labels if label in (run.facts.get("peers") or ())]
    central = [label for label in run.labels if any(_sent(run, label)) and label not in peers]
    if central and table.secure_aggregation is None:
        others = [label for label in run.labels if label not in central and not run.is_pooled(label)]
        whose = f"{', '.join(central)}: the" if others else "The"
        yield f"{whose} server saw the update of each client in each round it took part in."
    if peers:
        yield (
            f"{', '.join(peers)}: clients saw the models of the clients that send to them, in every round. The "
            "coordinator of a network passes these on, and could read them too."
        )
    measured = run.description.get("evaluate", {}).get("splits")
    if measured and not real and any(has(table)):
        yield "Measurements at clients are for simulation only: they are not protected."
    elif measured and table.example_dp is None and not table.has_local_noise:
        yield "The server saw how well models do at each client: loss and metrics, and on how many examples."
    if scored := run.facts.get("sending scores"):
        names = ", ".join(run.client_name(client) for client in scored)
        yield (
            "ATTENTION: the server saw the model's scores and the true label of EVERY SINGLE EXAMPLE that was "
            f"measured, from {names}: [policy] example_scores is on there."
        )


def _has(run: RunData, table: PrivacyTable) -> Iterator[str]:
    """The protections, with the neighbours of the run's cohorts; those of an unknown cohort are not claimed."""
    clients, drawing = len(run.clients), run.known_sampling
    if not clients or drawing is None:
        return has(table)
    cohort = drawing.size(clients)
    return has(table, cohort, drawing.sampling == "poisson" or cohort == clients)


def _prepared(run: RunData) -> Iterator[str]:
    """What preparing the data shares, before the first round."""
    data = run.description.get("data")
    if not isinstance(data, Mapping):  # a Python program made the data
        return
    if run.is_network and data.get("preprocessing"):
        yield (
            "Before the run, each site gave away a summary of its training examples, to agree on preprocessing: for "
            "each feature how many examples know it, its mean and its variance, and the names of columns, categories "
            "and classes. Nothing protects these."
        )
    moments = [] if data.get("normalize") != "federated" else ["of each feature"]
    moments += ["of the label"] if data.get("scale_target") else []
    if moments:
        what = f"how many values {' and '.join(moments)} they know, their sum and the sum of their squares"
        yield f"To scale the data, clients share {what}, over their training examples."
    names = data.get("categorical")
    if isinstance(names, Sequence) and names:  # a table lists the categories in the file
        yield f"Clients share which categories occur in {', '.join(names)}, by name, and which classes the label has."


def _bytes(run: RunData) -> Iterator[str]:
    for label in run.labels:
        if run.is_pooled(label):
            yield f"{label}: all data is in one place, so every example of every client leaves it, with its label."
            continue
        sent = _sent(run, label)
        if any(sent):
            yield f"{label}: clients sent {show(sum(sent) / len(sent), 'bytes')} in all."
        elif sent:
            yield f"{label}: clients sent nothing of what they learnt."


def _sent(run: RunData, label: str) -> list[int]:
    """Return the bytes that clients sent in each seed that has begun; nothing if the data is in one place."""
    costs = [run.costs(*cell) for cell in run.cells if cell[0] == label and not run.is_pooled(label)]
    return [int(cost.bytes_up.sum()) for cost in costs if len(cost.rounds)]


def _spent(run: RunData, table: PrivacyTable) -> Iterator[str]:
    for kind, about in EPSILONS.items():
        part = table.example_dp if kind == "example_epsilon" else table.dp
        found = {cell: run.server_values(*cell, kind, "notes")[1] for cell in run.cells}
        spent = {cell: float(values[-1]) for cell, values in found.items() if len(values)}
        for (label, seed), value in spent.items():
            yield f"{label} (seed {seed}) has spent ε = {value:.3g}, for {about}."
        if len(spent) > 1 and part is not None:
            delta = len(spent) * part.delta
            yield (
                f"These {len(spent)} trained on the same data: a person who sees all of them learns as much as ε = "
                f"{sum(spent.values()):.3g} at δ = {delta:.3g} allows."
            )
