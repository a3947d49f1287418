"""What left the clients in a run, and which protections stood in the way: a section of the report.

A reader may quote one sentence alone. So each about a simulation says what would leave, and not what left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedloom.errors import FedloomError
from fedloom.experiment.store import OWN_MODELS
from fedloom.privacy.dp.accounted import Accounted
from fedloom.privacy.table import PrivacyTable
from fedloom.privacy.words import EPSILONS, has, lacks, outside
from fedloom.results.run_data import RunData
from fedloom.results.sentences import first_three
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
    claimed = [*_has(run, table), *_spent(run), *_kept(about, table), *outside(table, _shared_data(run), _is_real(run))]
    sent = [_sent(run, label) for label in about.labels]
    sends = not any(sent) or any(map(any, sent))
    return [*_seen(about, table), *_told(table), *_prepared(run), *_bytes(about), *claimed, *lacks(table, sends)]


def not_evaluated(run: RunData) -> str:
    """Why a run on a network has no numbers of clients, if its protections are the reason; otherwise nothing."""
    privacy = run.description.get("privacy") or {}
    if not run.is_network or not privacy:
        return ""
    protection = "secure aggregation" if "secure_aggregation" in privacy else "differential privacy"
    return f"was not evaluated: under {protection} nothing is measured at clients"


def _is_real(run: RunData) -> bool:
    """Whether something left a machine."""
    return run.is_network or (run.folder / NETWORK).is_dir()


def _seen(run: RunData, table: PrivacyTable) -> Iterator[str]:
    if not _is_real(run):
        yield "This was a simulation: nothing left a machine. What follows is what would leave a client on a network."
    peers = [label for label in run.labels if label in (run.facts.get("peers") or ())]
    central = [label for label in run.labels if any(_sent(run, label)) and label not in peers]
    if central and table.secure_aggregation is None:
        others = [label for label in run.labels if label not in central and not run.is_pooled(label)]
        what = "the update of each client in each round it"
        sentence = f"{_who(run, 'the server', 'saw', 'see')} {what} {'took' if _is_real(run) else 'takes'} part in."
        yield f"{', '.join(central)}: {sentence}" if others else _capital(sentence)
    if peers:
        yield (
            f"{', '.join(peers)}: {_who(run, 'clients', 'saw', 'see')} the models of the clients that send to them, in "
            "every round. The coordinator of a network passes these on, and could read them too."
        )
    yield from _measured(run, table)
    if scored := run.facts.get("sending scores"):
        names = ", ".join(run.client_name(client) for client in scored)
        yield (
            "ATTENTION: the server saw the model's scores and the true label of EVERY SINGLE EXAMPLE that was "
            f"measured, from {names}: [policy] example_scores is on there."
        )


def _who(run: RunData, who: str, did: str, do: str) -> str:
    """Return who did something, or in a simulation, who would do it."""
    return f"{who} {did}" if _is_real(run) else f"on a network, {who} would {do}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _measured(run: RunData, table: PrivacyTable) -> Iterator[str]:
    """Whether losses and metrics of clients left them."""
    real, measured = _is_real(run), run.description.get("evaluate", {}).get("splits")
    if not table.hides_metrics:
        more = "; loss and metrics on its splits, and on how many examples" if measured else ""
        who = _capital(_who(run, "the server", "saw", "see"))
        yield f"{who} how well models do at each client: the training loss of each pass over its data{more}."
    elif real and any(run.history(*cell) for cell in run.cells):
        yield (
            "ATTENTION: the training loss of each client left it, without mask and noise: an earlier version of "
            "fedloom sent it, whatever [privacy] said."
        )
    elif real:
        yield "No client's losses and metrics left it, because neither mask nor noise would cover them."
    else:
        yield (
            "On a network, no client's losses and metrics would leave it, because neither mask nor noise would cover "
            "them. Those in this report exist because it was a simulation: do not publish them if the data is real."
        )


def _told(table: PrivacyTable) -> Iterator[str]:
    """What a site says about itself on a network, besides answers."""
    secure = table.secure_aggregation is not None
    sizes = "" if secure else " how many examples they have for training, validation and test,"
    fewest = "the fewest clients in a sum"
    policy = f"and {fewest}" if table.hides_metrics else f"{fewest}, and what its policy withholds"
    yield (
        "When a site joins a network, the coordinator learns its name, its public key and its network address, the "
        f"names of its clients,{sizes} the shape of the data, the names of the classes, a hash of how rows are "
        "prepared, a mark that shows whether the data changed, the versions of its software and its kind of processor, "
        f"how it computes, {policy}. In each round, it learns which clients answer, and when. Nothing protects these."
    )


def _shared_data(run: RunData) -> Any:
    """Return [data] without what nobody shared: on a network, only a summary for `fedloom data agree` is."""
    data = run.description.get("data")
    if not isinstance(data, Mapping) or data.get("preprocessing") or not _is_real(run):
        return data
    return {key: value for key, value in data.items() if key not in ("normalize", "scale_target", "categorical")}


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
    summary = (
        "for each feature how many examples know it, its mean and its variance, and the names of columns, categories "
        "and classes. Nothing protects these."
    )
    if data.get("preprocessing"):  # everything that prepares rows stands in this file
        if _is_real(run):
            yield (
                "Before the run, each site gave away a summary of its training examples, to agree on preprocessing: "
                + summary
            )
        else:
            yield f"The file [data] preprocessing prepares rows. It was made of a summary of each site: {summary}"
        return
    if _is_real(run):
        yield "To prepare the data, clients shared nothing in this run."
        return
    moments = [] if data.get("normalize") != "federated" else ["of each feature"]
    moments += ["of the label"] if data.get("scale_target") else []
    if moments:
        what = f"how many values {' and '.join(moments)} they know, their sum and the sum of their squares"
        yield f"On a network, clients would share {what}, over their training examples, to scale the data."
    names = data.get("categorical")
    if isinstance(names, Sequence) and names:  # a table lists the categories in the file
        yield (
            f"On a network, clients would share which categories occur in {', '.join(names)}, by name, and which "
            "classes the label has."
        )


def _bytes(run: RunData) -> Iterator[str]:
    for label in run.labels:
        if run.is_pooled(label):
            left = "left" if _is_real(run) else "would leave"
            yield f"{label}: all data is in one place, so every example of every client {left} it, with its label."
            continue
        sent = _sent(run, label)
        if any(sent):
            yield f"{label}: {_who(run, 'clients', 'sent', 'send')} {show(sum(sent) / len(sent), 'bytes')} in all."
        elif sent:
            yield f"{label}: {_who(run, 'clients', 'sent', 'send')} nothing of what they learn."


def _sent(run: RunData, label: str) -> list[int]:
    """Return the bytes that clients sent in each seed that has begun; nothing if the data is in one place."""
    costs = [run.costs(*cell) for cell in run.cells if cell[0] == label and not run.is_pooled(label)]
    return [int(cost.bytes_up.sum()) for cost in costs if len(cost.rounds)]


def spent(run: RunData, kind: str) -> dict[tuple[str, int], Accounted]:
    """Return what each cell has spent of one kind of ε, and the numbers behind it."""
    privacy = run.description.get("privacy") or {}
    delta = (privacy.get("example_dp" if kind == "example_epsilon" else "dp") or {}).get("delta", math.nan)

    def last(cell: tuple[str, int], name: str) -> float | None:
        values = run.server_values(*cell, name, "notes")[1]
        return float(values[-1]) if len(values) else None

    found = {}
    for cell in run.cells:
        steps = last(cell, f"{kind}_steps")
        behind = (last(cell, f"{kind}_noise_multiplier"), last(cell, f"{kind}_sampling_rate"))
        if epsilon := last(cell, kind):  # 0 of an algorithm that releases nothing, which noise does not protect
            found[cell] = Accounted(kind, epsilon, delta, *behind, None if steps is None else int(steps), cell[0])
    return found


def epsilons(run: RunData) -> dict[str, list[dict[str, Any]]]:
    """Return what was spent as plain values, under "spent"; nothing without differential privacy."""
    rows = [{**asdict(one), "seed": seed} for kind in EPSILONS for (_, seed), one in spent(run, kind).items()]
    return {"spent": rows} if rows else {}


def _spent(run: RunData) -> Iterator[str]:
    for kind, about in EPSILONS.items():
        found = spent(run, kind)
        for label, seeds in _by_label(found).items():
            low, high = (f"{pick(found[label, seed].epsilon for seed in seeds):.3g}" for pick in (min, max))
            each = " in each" if low == high and len(seeds) > 1 else ""
            much = low if low == high else f"{low} to {high}"
            yield f"{_named(label, seeds)} has spent ε = {much}{each}, for {about}."
        for words in dict.fromkeys(one.words for one in found.values() if one.words):
            behind = _by_label(cell for cell, one in found.items() if one.words == words)
            whose = first_three([_named(label, seeds) for label, seeds in behind.items()])
            yield f"{whose}: another accountant can compute ε again from {words}."
        if len(found) > 1:
            delta = math.fsum(one.delta for one in found.values())
            yield (
                f"These {len(found)} trained on the same data: a person who sees all of them learns as much as ε = "
                f"{sum(one.epsilon for one in found.values()):.3g} at δ = {delta:.3g} allows."
            )


def _kept(run: RunData, table: PrivacyTable) -> Iterator[str]:
    """The models that stay at clients: noise is for what leaves them."""
    if table.dp is None or table.example_dp is not None:
        return
    own = {*(run.facts.get(OWN_MODELS) or ())}
    own |= {label for label in run.labels if (sent := _sent(run, label)) and not any(sent)}
    labels = [label for label in run.labels if label in own]
    if labels:
        yield (
            f"{', '.join(labels)}: ATTENTION: a client's own model has no noise, and ε says nothing about it. Passing "
            "it on reveals what it has learnt from this client."
        )


def _by_label(cells: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the seeds of each algorithm."""
    found = defaultdict[str, list[int]](list)
    for label, seed in cells:
        found[label].append(seed)
    return found


def _named(label: str, seeds: Sequence[int]) -> str:
    """Return an algorithm with its seeds.

    >>> _named("fedavg", [1]), _named("fedavg", [1, 2, 3, 4])
    ('fedavg (seed 1)', 'fedavg (4 seeds: 1, 2, 3 and 1 more)')
    """
    one = f"seed {seeds[0]}"
    return f"{label} ({one if len(seeds) == 1 else f'{len(seeds)} seeds: {first_three([*map(str, seeds)])}'})"
