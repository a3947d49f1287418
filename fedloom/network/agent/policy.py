"""A site's file: its name, its data, and its policy. The agent enforces the policy; nobody else can change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from fedloom.algorithms import ALGORITHMS
from fedloom.data.sources.base import expanded
from fedloom.errors import FedloomError, InputError, nearest
from fedloom.experiment.experiment_file import Experiment, read, read_toml
from fedloom.experiment.tables import TaskTable
from fedloom.metrics import LOSSES, short_name
from fedloom.models import MODELS
from fedloom.network.protocol.code_fingerprint import code_files
from fedloom.network.protocol.verbs import SECURE_KINDS, VERBS, Verb
from fedloom.privacy.secure.graph import FULL
from fedloom.privacy.table import SITES_THRESHOLD, PrivacyTable, Probability
from fedloom.record import Count, Positive, Record, Share, Whole
from fedloom.results.safe_text import plain
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.user_code import is_code

if TYPE_CHECKING:
    from fedloom.network.protocol.messages import ClientAnswer

Names = tuple[str, ...] | Literal["shipped"]
TRUST = (
    "This site must trust the coordinator in three things. It can read each client's update, and updates can reveal "
    "examples. It chooses the models that are measured here, and crafted ones reveal more. It says how many clients a "
    "round has."
)
SECURE_TRUST = (
    "Secure aggregation: the coordinator can read sums over at least {fewest} clients, and no client's update, weight "
    "or metric. It also learns the names of the clients here, and which rounds they answer. This site must trust that "
    "the other clients are not all its own: list their fingerprints in [policy] peers to be sure."
)
SPARSE_TRUST = (
    f" In a round of more than {FULL} clients, it must also trust the coordinator to follow the protocol: [policy] "
    f"max_secure_cohort = {FULL} refuses such rounds."
)
SCORES_LEAVE = (
    "ATTENTION: the model's scores and the true label of EVERY SINGLE EXAMPLE that is measured leave this site, "
    "because its file says [policy] example_scores = true. Without that line, only one number per client and split "
    "leaves for each metric."
)

ALIKE = (
    " The {algorithms} algorithms of this run begin with the same weights: if a client here is missing from one of "
    "their first sums, the difference of the sums can be close to its update."
)


def trust(privacy: PrivacyTable, policy: Policy, algorithms: int = 1) -> str:
    """Say what this site must trust the coordinator in, in a run of this many algorithms."""
    secure = privacy.secure_aggregation
    if secure is None:
        return TRUST
    is_sparse = policy.max_secure_cohort is None or policy.max_secure_cohort > FULL
    fewest = max(secure.min_clients, policy.min_cohort)
    text = SECURE_TRUST.format(fewest=fewest) + (SPARSE_TRUST if is_sparse else "")
    return text if algorithms == 1 or privacy.has_distributed_noise else text + ALIKE.format(algorithms=algorithms)


class Refused(FedloomError):
    """The site's policy does not allow something. Both sides see the message, which may quote the coordinator.

    If the message says more than others may know, the coordinator reads `told` instead.
    """

    def __init__(self, message: str, told: str = "") -> None:
        super().__init__(plain(message))
        self.told = told or str(self)


class SiteTable(Record):
    """[site]: the site's name, and how its agent works."""

    name: str
    """The site's name."""
    hosts: tuple[Whole, ...] | None = None
    """For a rehearsal: the clients of the partition that this site hosts, by number."""
    base: str | None = None
    """The folder that relative paths start at. By default, the file's own."""
    device: str = "cpu"
    """The device that computes."""
    compress: bool = False
    """Compress tensors with zstd in both directions, for slow links."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not value or len(value) > 64 or not value.isprintable():
            raise InputError(f"[site] name must be a short word, such as kerry. Got {value!r} instead.")
        return value


class Policy(Record):
    """[policy]: what may be run here and what may leave."""

    algorithms: Names = "shipped"
    """The algorithms that may run here. You must name each one that is not shipped with fedloom."""
    models: Names = "shipped"
    """The models that may run here."""
    losses: Names = "shipped"
    """The losses that may run here."""
    verbs: tuple[Verb, ...] = VERBS
    """The verbs that clients here answer."""
    min_cohort: Count = 1
    """The fewest clients of a round, also of an evaluation, and the fewest updates in a sum with one from here. The
    agent must believe the coordinator's count; an honest coordinator abandons a round with fewer.
    """
    min_examples: Count = 1
    """The fewest training examples that a client of this site must have. Its validation and test splits count as empty
    if they have fewer, and nothing about them leaves.
    """
    max_evaluations: Whole | None = None
    """How often a run may measure one client on one split. By default, twice what the announced run needs. A run
    that needs more is refused before it starts.
    """
    metrics: tuple[str, ...] | Literal["means"] = "means"
    """The metrics that may leave, each as one number per client and split. By default, those that are means over
    examples. This does not limit the weights and public numbers of an algorithm's updates.
    """
    example_scores: bool = False
    """Also send what those of these metrics that are no means (AUROC, F1) are computed from: the model's scores and the
    true label of every single example. Then the coordinator also has their values over the examples of all sites.
    """
    code: dict[str, str] = Field(default_factory=dict)
    """The SHA-256 of every file with your own code that may run here, by its path from the site's file."""
    require_secure_aggregation: bool = False
    """Refuse runs in which the coordinator could read a client's update."""
    min_threshold: Share = SITES_THRESHOLD
    """The share of a round's clients that must be needed to unmask a sum. Two thirds protect against a coordinator that
    lies about who is left. It is always more than half of them.
    """
    max_secure_cohort: Count | None = None
    """The most clients in a round with secure aggregation. Above 100, not all clients share masks with all, and the
    protocol protects only against a coordinator that follows it. By default, there is no limit.
    """
    peers: tuple[str, ...] = ()
    """The fingerprints of the agents whose clients may be in a secure sum with ours. By default, any agent that the
    coordinator names, as long as its key does not change.
    """
    max_epsilon: Positive | None = None
    """Require differential privacy that this agent applies itself, with at most this ε in a run: [privacy] example_dp,
    or dp with noise = "local", or "distributed" if `assumed_colluders` allows it. Noise that the server adds is
    refused, because nobody here can verify it. No metrics leave.
    """
    assumed_colluders: Share | None = None
    """The share of a round's clients that may work with the coordinator, as far as this site believes. Noise that
    clients add together satisfies `max_epsilon` if it allows for at least as many. By default, it never does.
    """
    max_total_epsilon: Positive | None = None
    """The most ε of a client here in all runs together, by this agent's own ledger. It requires what `max_epsilon`
    requires.
    """
    max_delta: Probability = 1e-5
    """The largest δ that goes with `max_epsilon` and `max_total_epsilon`."""

    def check_experiment(self, algorithms: Iterable[str], task: TaskTable, base: Path) -> None:
        """Raise `Refused` unless this experiment may run here. Nothing of it is imported before or during this check.

        `base` is the folder in which code files are.
        """
        for name in algorithms:
            self._allowed("algorithm", name, self.algorithms, ALGORITHMS, base)
        self._allowed("model", task.model, self.models, MODELS, base)
        self._allowed("loss", task.loss, self.losses, LOSSES, base)
        for metric in task.metrics or ():
            if is_code(metric):
                self._allowed("metric", metric, "shipped" if self.metrics == "means" else self.metrics, {}, base)

    def check_privacy(self, privacy: PrivacyTable, cohort: int | None = None) -> None:
        """Raise `Refused` unless a run protects its clients as much as this site requires.

        `cohort` is the number of clients in a round, if it is known.
        """
        self._check_epsilon(privacy)
        secure = privacy.secure_aggregation
        if self.require_secure_aggregation and secure is None:
            raise Refused(
                "the policy requires secure aggregation ([policy] require_secure_aggregation), and the run has none: "
                "the coordinator reads updates"
            )
        if secure is not None and secure.threshold < self.min_threshold:
            raise Refused(
                f"the policy requires a threshold of at least {self.min_threshold:g} in secure aggregation ([policy] "
                f"min_threshold), and the run has {secure.threshold:g}"
            )
        if secure is not None and cohort is not None and cohort > (self.max_secure_cohort or cohort):
            raise Refused(
                f"the policy allows at most {self.max_secure_cohort} clients in a round with secure aggregation "
                f"([policy] max_secure_cohort), and this one has {cohort}"
            )

    def _check_epsilon(self, privacy: PrivacyTable) -> None:
        limits = {"max_epsilon": self.max_epsilon, "max_total_epsilon": self.max_total_epsilon}
        most, key = min(((limit, key) for key, limit in limits.items() if limit is not None), default=(None, ""))
        if most is None:
            return
        offers = [privacy.example_dp, privacy.dp if self._accepts_noise(privacy) else None]
        here = [(offer.epsilon, offer.delta) for offer in offers if offer is not None and offer.epsilon is not None]
        need = f"the policy requires differential privacy with ε at most {most:g} ([policy] {key})"
        if not here:
            raise Refused(
                f"{need} that this agent applies itself: [privacy] example_dp, or dp with an epsilon and noise = "
                '"local". Noise that the server adds cannot be verified here, and noise = "distributed" counts if the '
                "policy has assumed_colluders, and the run's dp colluders are at least as many"
            )
        if any(epsilon <= most and delta <= self.max_delta for epsilon, delta in here):
            return
        offered = ", ".join(f"ε = {epsilon:g} at δ = {delta:g}" for epsilon, delta in here)
        raise Refused(f"{need} at δ at most {self.max_delta:g} ([policy] max_delta), and the run offers {offered}")

    def _accepts_noise(self, privacy: PrivacyTable) -> bool:
        """Whether the noise of a run's clients satisfies `max_epsilon`: their own, or that of the honest ones."""
        if privacy.dp is not None and privacy.has_distributed_noise:
            return self.assumed_colluders is not None and privacy.dp.colluder_share >= self.assumed_colluders
        return privacy.has_local_noise

    def check_assignment(self, kind: str, verb: str, cohort: int, roles: Collection[str]) -> None:
        """Raise `Refused` unless our clients may do this; `roles` are those of its tensors."""
        secure = kind in SECURE_KINDS and verb == "reduce"
        if ((kind == "train") != (verb != "evaluate") and not secure) or ("peers" in roles) != (verb == "exchange"):
            tensors = ", ".join(sorted(roles))
            raise Refused(f"inconsistent request: kind '{kind}' with tensors {tensors} does not match verb '{verb}'")
        if verb not in self.verbs:
            raise Refused(f"the policy allows {', '.join(self.verbs) or 'nothing'}, not {verb} ([policy] verbs)")
        if cohort < self.min_cohort:
            raise Refused(
                f"the policy requires at least {self.min_cohort} clients in a round ([policy] min_cohort), and this "
                f"one has {cohort}"
            )

    def check_examples(self, examples: Mapping[str, int]) -> None:
        """Raise `Refused` if a client has too few training examples."""
        for client, count in examples.items():
            if count < self.min_examples:
                raise Refused(
                    f"the policy requires at least {self.min_examples} training examples ([policy] min_examples), and "
                    f"'{client}' has fewer"
                )

    def shown_size(self, count: int) -> int:
        """Return the size of a split as others see it: a split that is too small counts as empty."""
        return count if count >= self.min_examples else 0

    def withhold(self, answer: ClientAnswer, task: Task) -> ClientAnswer:
        """Return an answer without the metrics that may not leave. A metric that is no mean leaves as one number."""
        is_mean, withheld = means(task), self.withheld(task)  # all of them, with a limit on ε
        measured = {}
        for where, found in answer.measured.items():
            sums = {name: math.nan if name in withheld else value for name, value in found.sums.items()}
            scores = {name: value for name, value in found.scores.items() if name not in withheld}
            values = replace(found, scores=scores).values(task)
            measured[where] = Measured(found.count, sums, summaries={name: values[name] for name in scores})
            if scores and self.example_scores:
                measured[where] = replace(measured[where], scores=scores, targets=found.targets)

        def stays(key: str) -> bool:  # a key of an epoch, such as validation_accuracy
            metric = max((name for name in is_mean if f"_{key}".endswith(f"_{name}")), key=len, default=key)
            return not self.may_leave(metric, is_mean.get(metric, True))

        left = [{key: value for key, value in epoch.items() if not stays(key)} for epoch in answer.history]
        history = tuple(epoch for epoch in left if epoch)  # how many there were depends on the data, with patience
        return replace(answer, measured=measured, history=history)

    @property
    def limits_epsilon(self) -> bool:
        """Whether only what noise covers may leave."""
        return self.max_epsilon is not None or self.max_total_epsilon is not None

    def withheld(self, task: Task) -> tuple[str, ...]:
        """Return the metrics of a task, and the loss, that may not leave."""
        return tuple(name for name, mean in means(task).items() if not self.may_leave(name, mean))

    def metric_lines(self, task: Task) -> Iterator[str]:
        """Say which metrics of a task are withheld, and whether scores of single examples leave."""
        if withheld := self.withheld(task):
            allowed = [*means(task)] if self.metrics == "means" else [*self.metrics, *withheld]
            names = ", ".join(f'"{name}"' for name in allowed)
            yield (
                f"The policy withholds {', '.join(withheld)}. To let each leave, as one number per client and split: "
                f"[policy] metrics = [{names}]."
            )
        if self.sends_scores(task):
            yield SCORES_LEAVE

    def sends_scores(self, task: Task) -> bool:
        """Return whether scores and labels of single examples leave with a task's metrics."""
        withheld = self.withheld(task)
        return self.example_scores and any(m.summary and m.name not in withheld for m in task.measures)

    def may_leave(self, metric: str, is_mean: bool) -> bool:
        """Return whether a metric's values may leave. They have no noise, so no ε covers them."""
        if self.limits_epsilon:
            return False
        return is_mean if self.metrics == "means" else metric in map(short_name, self.metrics)

    def _allowed(self, what: str, name: str, allowed: Names, shipped: Mapping[str, Any], base: Path) -> None:
        if name in (shipped if allowed == "shipped" else allowed):
            for path, sha256 in code_files(name, base).items() if is_code(name) else ():
                if self.code.get(path) != sha256:
                    raise Refused(
                        f"the policy does not allow the file {path} as it is: read it, and then add "
                        f'code = {{ "{path}" = "{sha256}" }} to [policy] to allow it'
                    )
            return
        key = "losses" if what == "loss" else f"{what}s"
        if allowed == "shipped" and ":" in name:
            raise Refused(
                f"the policy allows only fedloom's own code, and the {what} is '{name}': name it in [policy] {key} to "
                "allow it"
            )
        known = ", ".join(allowed) if allowed != "shipped" else "those that ship with fedloom"
        raise Refused(f"the policy does not allow the {what} '{name}'. Allowed: {known} ([policy] {key})")


def means(task: Task) -> dict[str, bool]:
    """Return the loss and metrics of a task by name, and whether each is a mean over examples, or computed from one."""
    return {"loss": True, **{metric.name: metric.values is not None for metric in task.measures}}


@dataclass(frozen=True)
class Site:
    """A parsed site file."""

    table: SiteTable
    policy: Policy
    data: dict[str, Any]
    base: Path

    @property
    def name(self) -> str:
        return self.table.name

    def hosted(self, clients: int) -> Sequence[int]:
        """Return which of the clients in its data this site hosts."""
        return range(clients) if self.table.hosts is None else self.table.hosts


def rehearsal(experiment: Experiment, name: str, hosts: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return a site file's tables for some clients of the experiment's own data; they allow what it needs."""
    task, algorithms = experiment.task, sorted({*experiment.names.values()})
    names = [name for name in (*algorithms, task.model, task.loss, *(task.metrics or ())) if is_code(name)]
    return {
        "site": {"name": name, "base": str(experiment.base.resolve()), "hosts": list(hosts)},
        "data": written_data(experiment),
        "policy": {
            "algorithms": algorithms,
            "models": [task.model],
            "losses": [task.loss],
            "code": {path: sha for name in names for path, sha in code_files(name, experiment.base).items()},
            "metrics": ["loss", *(("accuracy", "mae") if task.metrics is None else task.metrics)],
        },
    }


def written_data(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's [data] as written: a source may treat a default and a given value differently."""
    tables = (experiment.data, experiment.source)
    return {k: v for one in tables for k, v in one.model_dump(mode="json", exclude_unset=True).items() if v is not None}


def load_site(path: Path) -> Site:
    """Read a site's file."""
    if not path.is_file():
        raise InputError(
            f"There is no site file {path}. It needs a [data] table, and may have a [site] and a [policy] table."
        )
    return site_of(read_toml(path), path)


def site_of(values: Mapping[str, Any], path: Path) -> Site:
    """Return a site from its file's tables."""
    known = ("site", "data", "policy")
    for key, value in values.items():
        if key not in known:
            raise InputError(f"A site file has no table '{key}'. Known: {', '.join(known)}.{nearest(key, known)}")
        if not isinstance(value, Mapping):
            raise InputError(f"'{key}' must be a table: [{key}]. Got {value!r} instead.")
    if "data" not in values:
        raise InputError(f'{path} has no [data] table: add one, such as source = "csv", path = "mine.csv".')
    table = read(SiteTable, "site", {"name": path.stem, **values.get("site", {})})
    base = Path(table.base) if table.base else path.resolve().parent
    return Site(table, read(Policy, "policy", values.get("policy", {})), _one_client(values["data"], base), base)


def _one_client(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return [data] in which a CSV file that names no clients is one client: the site."""
    path = base / expanded(Path(str(data.get("path"))))
    is_one = data.get("source") == "csv" and "client" not in data and not path.is_dir()  # of a folder, each file is one
    return {**({"partition": {"name": "iid", "clients": 1}} if is_one else {}), **data}
