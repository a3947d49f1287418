"""Says in plain words which protections an experiment has, and which it lacks: for `fedloom check` and the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedloom.privacy.table import SITES_THRESHOLD, PrivacyTable

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm

ADJACENCY = "two runs that differ in one client, added or removed"
REPLACED = "two runs that differ in one client, replaced by another one"
LOCAL = "two runs in which one client has other data, even for somebody who sees its updates"
TOGETHER = (
    "two runs, in one of which zeros replace what one client sends, even for the server and its colluders. That the "
    "client took part is not secret"
)
EXAMPLE = "two data sets that differ in one of a client's examples, even for somebody who sees its updates"
# the numbers of a round's record that are an ε, and what each is about
EPSILONS = {
    "epsilon": ADJACENCY,
    "replace_epsilon": REPLACED,
    "distributed_epsilon": TOGETHER,
    "local_epsilon": LOCAL,
    "example_epsilon": EXAMPLE,
}
IN_A_WORD = {
    "epsilon": "ε (± 1 client)",
    "replace_epsilon": "ε (1 other client)",
    "distributed_epsilon": "ε (1 client's change or zero)",
    "local_epsilon": "ε (a client's data)",
    "example_epsilon": "ε (± 1 example)",
}


# what to do where a client's weight has no bound
BOUND_WEIGHTS = (
    'Set weights = "uniform" in the algorithm, if it has that key, or [cohort] max_examples, such as 1000: clients '
    "then count by their examples up to it."
)
# what to do where clients' numbers do not leave them
TEST_SET = (
    "To know how good the model is, give the coordinator a test set of its own: [data] with source, path, label and "
    "server = 1.0."
)
LARGE = 8.0  # an ε above this hardly limits anything: below 1 is strong, 8 is weak
SMALL = 4  # clients in a sum: with fewer, one or two of them learn the update of another one
UNKNOWN = 100  # how many a δ is compared with where nobody knows how many there are


def called(algorithm: Algorithm, label: str = "") -> str:
    """Return what an error calls an algorithm: its label in the experiment file, and which algorithm that is."""
    name = vars(type(algorithm)).get("name", type(algorithm).__name__.lower())
    return f"{label} ({name})" if label not in ("", name) else name


def unmeasured(table: PrivacyTable, server_has_data: bool) -> Iterator[str]:
    """Yield a sentence if nothing is measured in a run on a network."""
    if table.hides_metrics and not server_has_data:
        yield f"Nothing will be measured: with [privacy], no metrics leave clients on a network. {TEST_SET}"


def one_place(key: str, who: str) -> str:
    """Say why no protection of clients holds for an algorithm that trains on all data in one place."""
    return (
        f"[privacy] {key} protects what clients send, and {who} trains on all examples in one place. Move {who} into a "
        f"file of its own without {key}."
    )


def has(table: PrivacyTable, cohort: int | None = None, whole_or_poisson: bool = True) -> Iterator[str]:
    """Yield a sentence for each protection; `cohort` is the number of clients in a round, if it is known.

    `whole_or_poisson` says whether all clients take part in a round, or each with some probability. Rounds with a fixed
    number of the clients have other neighbours.
    """
    secure, dp, example = table.secure_aggregation, table.dp, table.example_dp
    if secure is not None:
        fewest = secure.min_clients
        sees = f"the server sees sums over at least {fewest} clients, and no single update"
        yield f"Secure aggregation: on a network, {sees}."
        if cohort is not None:
            needed = secure.needed(cohort)
            lost = max(cohort - needed, 0)
            yield (
                f"Of {cohort} clients in a round, {needed} must stay until its end: "
                f"{lost or 'none'} may be lost, otherwise the round is abandoned."
            )
        else:
            examples = ((n, n - secure.needed(n)) for n in sorted({max(fewest, 3), max(fewest, 10), max(fewest, 100)}))
            listed = ", ".join(f"{lost or 'none'} of {n}" for n, lost in examples)
            yield f"How many clients of a round may be lost depends on how many it has: {listed}."
        if secure.threshold < SITES_THRESHOLD:
            yield (
                f"On a network, sites refuse threshold = {secure.threshold:g}, unless their files say [policy] "
                f"min_threshold = {secure.threshold:g}: by default they require {SITES_THRESHOLD:g}."
            )
    if dp is not None:
        spent = f"ε = {dp.epsilon:g}" if dp.epsilon is not None else f"noise multiplier {dp.noise_multiplier or 0:g}"
        who = {"server": "the server", "distributed": "all clients together", "local": "each client"}[dp.noise]
        about = ADJACENCY if whole_or_poisson else REPLACED
        about = {"server": about, "distributed": TOGETHER, "local": LOCAL}[dp.noise]
        yield f"Differential privacy of clients: {spent}, δ = {dp.delta:g}, for {about}. Noise is added by {who}."
        if secure is not None and dp.noise == "distributed" and cohort is not None:
            most, needed = dp.most_colluders(cohort), secure.needed(cohort)
            yield (
                f"Of {cohort} clients in a round, up to {most or 'none'} may work with the server: the noise of "
                f"{max(needed - most, 0)} honest ones is enough. ε does not hold if more do."
            )
    if example is not None:
        yield (
            f"Differential privacy of examples: each client spends ε = {example.epsilon:g}, δ = {example.delta:g}, for "
            f"{EXAMPLE}. ε does not cover how many examples it has, nor how they decide the scale of its data."
        )


def doubts(
    table: PrivacyTable,
    clients: int | None = None,
    examples: int | None = None,
    where: str = "",
    cohort: int | None = None,
    at_least: int = 0,
) -> Iterator[str]:
    """Yield a sentence for each ε or δ that protects hardly anybody, and for sums over few clients.

    `clients` is their number, and `examples` that of the smallest client's training examples, if they are known, with
    `where` that is, such as " in seed 1". `cohort` is the number of clients in each round, if it is known, and
    `at_least` the fewest in a sum that a site allows.
    """
    yield from _small_sums(table, cohort, at_least)
    dp, example = table.dp, table.example_dp
    if dp is not None:
        many = f"the run has {clients} clients" if clients else "the number of clients is not known here"
        yield from _doubts("dp", dp.epsilon, dp.delta, clients, many, "client")
    if example is not None:
        many = "how many examples clients have is not known here"
        many = f"the smallest client has {examples} training examples{where}" if examples else many
        yield from _doubts("example_dp", example.epsilon, example.delta, examples, many, "example")


def _small_sums(table: PrivacyTable, cohort: int | None, at_least: int) -> Iterator[str]:
    secure = table.secure_aggregation
    if secure is None:
        return
    fewest = max(secure.min_clients if cohort is None else secure.needed(cohort), at_least)
    if fewest >= SMALL:
        return
    noise = ", with the noise on it" if table.dp is not None or table.example_dp is not None else ""
    each = f"each of the two can subtract its own update from the sum, and has the other's{noise}"
    two = f"two of the three who tell each other their updates have the third's{noise}"
    yield (
        f"[privacy] secure_aggregation: a sum may be over only {fewest} clients: {each if fewest == 2 else two}. Set "
        f"min_clients = {SMALL} or more, with at least as many clients in a round."
    )


def _doubts(key: str, epsilon: float | None, delta: float, count: int | None, many: str, one: str) -> Iterator[str]:
    if delta >= 1 / (count or UNKNOWN):
        whose = "all data of one client" if one == "client" else "one example of each client"
        yield (
            f"[privacy] {key}: δ = {delta:g} protects hardly anybody. It is the probability that the guarantee fails, "
            f"and {many}: even publishing {whose}, drawn at random, would meet it. Set delta far below "
            f"{1 / (count or UNKNOWN):.2g}, such as 1e-5."
        )
    if epsilon is not None and epsilon > LARGE:
        odds = f"e^{epsilon:g}" + (f" = {_rough(math.exp(epsilon))}" if epsilon < 500 else "")
        yield (
            f"[privacy] {key}: ε = {epsilon:g} protects hardly anybody. What others see may change the odds that they "
            f"give to the presence of one {one} by a factor of {odds}. With ε = 1 it is 3, with ε = 8 it is 3,000. "
            f"Below 1 is strong, 8 is weak, and above {LARGE:g} it is hardly a protection."
        )


def _rough(value: float) -> str:
    """One digit of a large number, in full as long as it can be read."""
    return f"{float(f'{value:.0e}'):,.0f}" if value < 1e6 else f"{value:.0e}"


def outside(table: PrivacyTable, data: Any, at_sites: bool = False) -> Iterator[str]:
    """Yield what neither ε nor masks cover of how a [data] table prepares data; sites may have tables of their own."""
    given = data if isinstance(data, Mapping) else {}  # otherwise a Python program made the data
    shares = given.get("normalize") == "federated" or given.get("scale_target") or given.get("preprocessing")
    agreed = given.get("preprocessing")
    learns_categories = isinstance(given.get("categorical"), (list, tuple)) and bool(given["categorical"])
    if shares and (table.dp is not None or table.example_dp is not None):
        one = "example" if table.dp is None else "client"
        what = "A site's summary for `fedloom data agree` gives" if agreed else "The sums that scale the data give"
        masks = " and without masks" if table.secure_aggregation else ""
        yield (
            f"ε is about training. {what} means and variances without noise{masks}, and one {one} changes how all data "
            "is scaled: ε does not cover this."
        )
    elif (shares or learns_categories) and table.secure_aggregation is not None:
        sums = "means and variances" if agreed else "sums and sums of squares"
        leave = [f"counts, {sums} of each feature"] if shares else []
        leave += ["names of categories"] if learns_categories or agreed else []
        yield (
            "Secure aggregation is about training. Masks do not cover how the data is prepared before it: "
            f"{', and '.join(leave)}, leave each client as they are."
        )
    if given.get("normalize") == "client" and table.example_dp is not None:
        yield (
            "ε is about training. A client's own examples decide how its data is scaled, so one example changes the "
            "features of the others: ε does not cover this."
        )
    if learns_categories and not agreed and table.example_dp is not None:
        yield (
            "ε does not cover which categories occur: the model has a feature for each that any example has. A table "
            "in [data] categorical lists those that there may be."
        )
    if given.get("group") or at_sites:
        yield from of_people(table, given.get("group"))


def scaled_by_examples(table: PrivacyTable, whose: str) -> Iterator[str]:
    """Yield what the ε of one example leaves out if examples decide how data is scaled: `whose`, or nobody's."""
    if table.example_dp is not None and whose:
        yield (
            f"[privacy] example_dp: {whose} training examples decide how data is scaled, so one of them changes the "
            "features of the others, and training with them. ε assumes that the scale stays the same, and does not "
            "cover this. Scale by bounds that you know without looking at the data, such as [data] normalize = "
            "{ age = [0, 100] }."
        )


def of_people(table: PrivacyTable, group: str | None, most: int | None = None) -> Iterator[str]:
    """Yield what an ε of examples means for people with several; `most` is the largest number of one person."""
    example = table.example_dp
    if example is None or most == 1:
        return
    named = f" ({group})" if group else ""
    rows = "ε and δ are about single examples, which are rows and not people"
    if most is None:
        yield (
            f"{rows}, and several may be of one person{named}: with k examples of a person, the ε of the person is "
            "about k times as large, and δ grows even faster, by up to k · e^((k − 1) ε)."
        )
        return
    # group privacy: what k examples together are promised (Dwork and Roth, 2014; Vadhan, 2017, Lemma 2.2)
    log_delta = math.log(most) + (most - 1) * example.epsilon + math.log(example.delta)
    fails = f"δ of up to {math.exp(log_delta):.2g}" if log_delta < 0 else "no bound on δ, so no guarantee"
    yield (
        f"{rows}. One person{named} has {most} examples here: for this person, that means ε = "
        f"{most * example.epsilon:g} with {fails}."
    )


def lacks(table: PrivacyTable, sends: bool = True) -> Iterator[str]:
    """Yield a sentence for each protection that is missing, and what that means; `sends` is whether clients do."""
    if table.secure_aggregation is None and sends:
        yield "No secure aggregation: on a network, the coordinator can read each client's update."
    if table.dp is None and table.example_dp is None:
        yield "No differential privacy: nothing limits what the model tells about the data it was trained on."
    elif table.dp is not None and table.dp.noise == "server":
        yield "The server adds the noise: clients must trust it to do so."
