"""Where two algorithms must be the same thing, and where an algorithm must arrive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom import keys, tree
from fedloom.aggregation import weights
from fedloom.algorithm import Algorithm
from fedloom.algorithms import ALGORITHMS, Peer
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import Place
from fedloom.task import Task
from fedloom.testing.ways import InProcess
from fedloom.training.probe import probe
from fedloom.tree import Groups, Tree
from tests.conformance.test_robust import as_given
from tests.conformance.transcriptions import Attendance, Line, Softmax, TwoLayers, World, three_clients
from tests.conftest import ALL_TRAIN, CLASSES, FEATURES, Dense, Normed, Pictures, federation, slow_after

QUIET = Evaluation(splits=())
SIZES = (14, 30, 21)
ATTENDANCE = Attendance(rounds=((0, 1, 2), (0, 2), (0, 1, 2)))
SMALL = {"lr": 0.1, "batch_size": 4, "epochs": 2.0}
FULL = {"lr": 0.1, "batch_size": "full", "epochs": 1.0}


def make(name: str, **settings: Any) -> Algorithm:
    if name not in ALGORITHMS:
        pytest.skip(f"fedloom has no algorithm '{name}' yet")
    return ALGORITHMS[name](**settings)


def after(
    algorithm: Algorithm,
    task: Task,
    data: Federation | None = None,
    rounds: int = 3,
    sampling: Sampling = ATTENDANCE,
) -> tuple[Groups, dict[int, Groups]]:
    """The server's state and what all clients keep, after some rounds."""
    data = federation(SIZES) if data is None else data
    own = {client: algorithm.init_own(task, task.initial()) for client in range(data.clients)}
    state: Groups = {}
    for record in fit(data, task, algorithm, rounds, seed=2, sampling=sampling, evaluation=QUIET):
        state = record.state
        own.update(record.own)
    return state, own


def model_after(algorithm: Algorithm, task: Task, **more: Any) -> Tree:
    state, _ = after(algorithm, task, **more)
    found = algorithm.server_model(task, state)
    assert found is not None
    return found


def assert_close(a: Tree, b: Tree, tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


# --- neutral settings are FedAvg

EXACTLY = [
    ("fedprox", {"mu": 0.0}, {}),
    ("qfedavg", {"q": 0.0}, {"weights": "uniform"}),
    ("qfedavg", {"q": 0.0, "weights": "examples"}, {}),
    ("ditto", {"lam": 0.0}, {}),
    ("ditto", {"lam": 3.0}, {}),
]
NEARLY = [
    ("fedavgm", {"server_momentum": 0.0, "server_lr": 1.0}, {}),
    ("staged", {"groups": 2}, {}),
    ("perfedavg", {"alpha": 0.0}, {}),
    ("ifca", {"clusters": 1}, {}),
    ("fed_dropout", {"rate": 0.0}, {}),
]


@pytest.mark.parametrize(("name", "neutral", "average"), EXACTLY)
@pytest.mark.parametrize("net", [Dense, Normed, Pictures])
def test_neutral_settings_are_fedavg_bit_for_bit(
    net: type[nn.Module], name: str, neutral: dict[str, Any], average: dict[str, Any]
) -> None:
    task = Task(net)
    found, expected = (
        model_after(make(name, **SMALL, **neutral), task),
        model_after(make("fedavg", **SMALL, **average), task),
    )
    assert tree.sha256(found) == tree.sha256(expected)


@pytest.mark.parametrize(("name", "neutral", "average"), NEARLY)
@pytest.mark.parametrize("net", [Dense, Pictures])
def test_neutral_settings_are_fedavg_up_to_rounding(
    net: type[nn.Module], name: str, neutral: dict[str, Any], average: dict[str, Any]
) -> None:
    task = Task(net, dtype="float64")
    algorithm = make(name, **SMALL, **neutral)
    state, own = after(algorithm, task)
    found = algorithm.server_model(task, state)
    found = algorithm.model(task, state, own[0]) if found is None else found
    assert_close(found, model_after(make("fedavg", **SMALL, **average), task))


def test_fedbn_without_normalisation_layers_is_fedavg_bit_for_bit() -> None:
    one, two = (model_after(make(name, **SMALL), Task(Dense)) for name in ("fedbn", "fedavg"))
    assert tree.sha256(one) == tree.sha256(two)


def test_fednova_is_fedavg_when_everybody_takes_as_many_steps() -> None:
    task, data = Task(Dense, dtype="float64"), federation((20, 20, 20))
    one, two = (model_after(make(name, **SMALL, momentum=0.5), task, data=data) for name in ("fednova", "fedavg"))
    assert_close(one, two)


def test_fednova_differs_from_fedavg_when_steps_differ() -> None:
    task = Task(Dense, dtype="float64")
    one, two = (model_after(make(name, **SMALL), task) for name in ("fednova", "fedavg"))
    assert any(not torch.allclose(one[name], two[name]) for name in one)


def test_fedsgd_is_fedavg_with_one_full_batch() -> None:
    task = Task(Dense, dtype="float64")
    assert_close(
        model_after(make("fedsgd", lr=0.1), task), model_after(make("fedavg", lr=0.1, batch_size="full"), task)
    )


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_staged_averages_are_flat_averages(weights: str, groups: int) -> None:
    task, data = Task(Normed, dtype="float64"), federation((14, 30, 21, 17, 40, 11))
    settings = {**SMALL, "weights": weights, "drop_last": True}
    everybody = Sampling()
    one = model_after(make("staged", **settings, groups=groups), task, data=data, sampling=everybody)
    assert_close(one, model_after(make("fedavg", **settings), task, data=data, sampling=everybody))


@pytest.mark.parametrize("net", [Dense, Normed])
def test_standard_averaging_among_peers_is_central_standard_averaging(net: type[nn.Module]) -> None:
    task, everybody = Task(net, dtype="float64"), Sampling()
    peers = make("peer", **SMALL, topology="full", weights="uniform")
    state, own = after(peers, task, sampling=everybody)
    central = model_after(make("fedavg", **SMALL, weights="uniform"), task, sampling=everybody)
    for client in range(3):
        assert_close(peers.model(task, state, own[client]), central)


def test_ditto_without_a_pull_is_training_alone() -> None:
    task = Task(Dense, dtype="float64")
    ditto, alone = make("ditto", **SMALL, lam=0.0), make("local", **SMALL)
    (state, own), (nothing, kept) = after(ditto, task), after(alone, task)
    for client in range(3):
        assert_close(ditto.model(task, state, own[client]), alone.model(task, nothing, kept[client]))


# --- clients' numbers mean nothing

DRAWN = {"fed_dropout", "fsvrg", "svrg", "cocoa"}  # a client's number decides what it draws, even with full batches


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - DRAWN))
def test_it_does_not_matter_which_client_has_which_number(name: str) -> None:
    task, algorithm = Task(Dense, dtype="float64"), make(name, **FULL)
    # a shuffled split would depend on a client's number, and clients need validation data for their scores
    data, order = federation(SIZES, split=Split(train=0.6, validation=0.4, test=0.0, shuffle=False)), (2, 0, 1)
    rows = torch.cat([torch.arange(*data.offsets[client : client + 2]) for client in order])
    offsets = np.cumsum([0, *(SIZES[client] for client in order)])
    other = replace(data, x=data.x[rows], y=data.y[rows], offsets=offsets, names=None)
    (state, own), (renamed, kept) = (after(algorithm, task, given, sampling=Sampling()) for given in (data, other))
    server = algorithm.server_model(task, state)
    if server is not None:
        again = algorithm.server_model(task, renamed)
        assert again is not None
        assert_close(server, again)
    for number, client in enumerate(order):
        assert_close(algorithm.model(task, state, own[client]), algorithm.model(task, renamed, kept[number]))


# --- selective inclusion: a client may be exactly one standard deviation below the mean, and rounding must not decide


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=7), st.booleans())
def test_who_is_within_one_standard_deviation_is_decided_exactly(counts: list[tuple[int, int]], higher: bool) -> None:
    scores = [Fraction(min(right, total), total) for right, total in counts]
    mean = sum(scores, Fraction(0)) / len(scores)
    variance = sum(((score - mean) ** 2 for score in scores), Fraction(0)) / len(scores)
    worse = [mean - score if higher else score - mean for score in scores]
    expected = [gap <= 0 or gap**2 <= variance for gap in worse]
    found = weights.within_one_std(torch.tensor([float(score) for score in scores], dtype=torch.float64), higher)
    assert (found > 0).tolist() == expected
    assert len(set(found[found > 0].tolist())) == 1


# --- SCAFFOLD with one local step


def test_scaffold_with_one_local_step_is_gradient_descent_because_the_controls_cancel() -> None:
    task, everybody = Task(Dense, dtype="float64"), Sampling()
    one = model_after(make("scaffold", **FULL, weights="uniform"), task, sampling=everybody, rounds=5)
    assert_close(one, model_after(make("fedsgd", lr=0.1, weights="uniform"), task, sampling=everybody, rounds=5))


def test_scaffold_begins_as_fedavg() -> None:
    task = Task(Dense, dtype="float64")
    one, two = (model_after(make(n, **SMALL, weights="uniform"), task, rounds=1) for n in ("scaffold", "fedavg"))
    assert_close(one, two)


def test_scaffold_with_one_local_step_keeps_each_clients_gradient_as_its_control() -> None:
    world = three_clients(Softmax(), batch=None, epochs=1)
    state, own = after(
        make("scaffold", **FULL), world.task, data=world.federation, rounds=1, sampling=Attendance(rounds=world.rounds)
    )
    gradients = [world.full_gradient(world.start(), client) for client in range(3)]
    for client, gradient in enumerate(gradients):
        found = [world.model.flatten(kept) for kept in own[client].values() if kept.keys() == world.model.leaves.keys()]
        assert any(np.allclose(kept, gradient, rtol=1e-9, atol=1e-12) for kept in found), f"client {client}"
    found = [world.model.flatten(group) for group in state.values() if group.keys() == world.model.leaves.keys()]
    assert any(np.allclose(group, np.mean(gradients, axis=0), rtol=1e-9, atol=1e-12) for group in found)


# --- FedBN


class LayerNormLSTM(nn.Module):
    """A cell with layer normalisation inside, as for next-word prediction."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.gates = nn.Linear(inputs + units, 4 * units)
        self.norms = nn.ModuleDict({gate: nn.LayerNorm(units) for gate in ("enter", "forget", "leave", "candidate")})
        self.memory_norm = nn.LayerNorm(units)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(x.shape[0], self.units)
        for now in x.unbind(1):
            parts = self.gates(torch.cat([now, hidden], 1)).chunk(4, 1)
            enter, forget, leave, candidate = (
                norm(part) for norm, part in zip(self.norms.values(), parts, strict=True)
            )
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(candidate)
            hidden = torch.sigmoid(leave) * torch.tanh(self.memory_norm(memory))
        return hidden


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = LayerNormLSTM(4, 5)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x.reshape(-1, 4, 4)))


class OwnNorm(nn.BatchNorm1d):
    """Somebody's own kind of batch normalisation, with a name that does not say so."""


class Nested(nn.Module):
    """Normalisation of all kinds, at several depths, with names that tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Sequential(nn.GroupNorm(2, 8)))
        )
        self.other = nn.ModuleList([nn.Linear(8, 8), OwnNorm(8), nn.LayerNorm(8)])
        self.bn_not = nn.Linear(8, 8)  # a name that lies
        self.channels = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(x)
        for layer in self.other:
            x = layer(x)
        return self.out(self.channels(self.bn_not(x).reshape(-1, 2, 4)).flatten(1))


LOCAL = {
    Words: ("cell.norms.", "cell.memory_norm."),
    Nested: ("deep.1.0.", "deep.1.2.0.", "other.1.", "other.2.", "channels."),
}


@pytest.mark.parametrize("net", [Words, Nested])
def test_fedbn_keeps_every_normalisation_layer_local_and_nothing_else(net: type[nn.Module]) -> None:
    task, data = Task(net, dtype="float64"), federation(SIZES)
    algorithm = make("fedbn", **{**SMALL, "batch_size": 6})
    state, own = after(algorithm, task, data)
    server = algorithm.server_model(task, state)
    assert server is not None
    models = [algorithm.model(task, state, own[client]) for client in range(3)]
    for name, leaf in models[0].items():
        same = [torch.equal(leaf, other[name]) for other in models[1:]]
        if not name.startswith(LOCAL[net]):
            assert all(same), f"{name} must be everybody's"
            assert torch.equal(leaf, server[name]), f"{name} must be the server's"
        elif leaf.is_floating_point():
            assert not any(same), f"{name} must be each client's own"


def test_fedbn_leaves_an_absent_clients_normalisation_alone() -> None:
    task, data = Task(Normed, dtype="float64"), federation(SIZES)
    algorithm = make("fedbn", **{**SMALL, "batch_size": 6})
    records = list(fit(data, task, algorithm, 2, seed=2, sampling=ATTENDANCE, evaluation=QUIET))
    before, later = (algorithm.model(task, record.state, records[0].own[1]) for record in records)
    assert 1 not in records[1].own
    for name in before.keys() - {"hidden.bias"}:  # which normalisation takes out again, so that it never moves
        assert torch.equal(before[name], later[name]) == name.startswith("norm."), name


# --- peers: gossip keeps the mean


@pytest.mark.parametrize("topology", ["full", "ring", "torus", "star", "k_regular", "erdos_renyi"])
@pytest.mark.parametrize("redraw", [False, True])
def test_metropolis_gossip_keeps_the_clients_mean_and_brings_them_together(topology: str, redraw: bool) -> None:
    x = np.random.default_rng(1).normal(size=(9, 4))
    data = Federation(torch.from_numpy(x), torch.zeros(9, dtype=torch.float64), np.arange(10), split=ALL_TRAIN)
    task = Task(nn.Linear, as_given, [], args={"in_features": 4, "out_features": 1, "bias": False}, dtype="float64")
    settings = {"weights": "metropolis", "topology": topology, "redraw": redraw, "degree": 4, "probability": 0.6}
    algorithm = make("peer", lr=1.0, batch_size="full", **settings)
    assert isinstance(algorithm, Peer)
    start = task.initial()["weight"].numpy().ravel()
    # client k adds x_k every round, then W ← A W. A is doubly stochastic, so the mean moves by that of x; and what is
    # not the mean shrinks at least by σ, the second largest singular value of A: d ≤ σ (d + ‖x − mean‖)
    apart, spread = 0.0, float(np.linalg.norm(x - x.mean(0)))
    for rounds in (1, 2, 3, 4):
        rate = np.linalg.svd(metropolis(algorithm.graph(9, 2, rounds).numpy()), compute_uv=False)[1]
        assert rate < 1 - 1e-6, "the graph must be connected for this test"
        apart = rate * (apart + spread)
        state, own = after(algorithm, task, data, rounds, Sampling())
        models = np.array([algorithm.model(task, state, own[c])["weight"].numpy().ravel() for c in range(9)])
        np.testing.assert_allclose(models.mean(0), start + rounds * x.mean(0), rtol=1e-9)
        assert np.linalg.norm(models - models.mean(0)) <= apart + 1e-9


def metropolis(graph: NDArray[np.bool_]) -> NDArray[np.float64]:
    degree = graph.sum(1) - 1  # everybody hears itself
    matrix = np.zeros(graph.shape)
    for i, j in zip(*np.nonzero(graph), strict=True):
        matrix[i, j] = 0.0 if i == j else 1 / (1 + max(degree[i], degree[j]))
    return matrix + np.diag(1 - matrix.sum(1))


# --- FSVRG


def test_fsvrg_on_one_client_is_svrg(monkeypatch: pytest.MonkeyPatch) -> None:
    # the client and the union of all clients have other keys, and so would walk their examples in another order
    monkeypatch.setattr(keys, "permutation", lambda key, count: np.arange(count)[::-1].copy())
    for model in (Softmax(), Line(), TwoLayers()):
        world = three_clients(model)
        sparse = world.federation.x
        data = replace(world.federation, offsets=np.array([0, len(sparse)]), split=ALL_TRAIN)
        settings = {"lr": 0.5, "batch_size": 1, "epochs": 1.0}
        one, two = (
            model_after(make(name, **settings), world.task, data=data, sampling=Sampling())
            for name in ("fsvrg", "svrg")
        )
        assert_close(one, two)


@pytest.mark.parametrize("name", ["fsvrg", "svrg"])
def test_the_settings_of_fsvrg_mean_the_same_however_they_are_given(name: str) -> None:
    flat = make(name, lr=0.3, batch_size=4, epochs=2.0)
    nested = make(name, train={"lr": 0.3, "batch_size": 4, "epochs": 2.0})
    assert flat == nested
    assert flat.replace() == flat
    assert make(name, lr=0.7, h=0.3).train == flat.train, "h is the step, whatever the lr of the others"


class Sparse:
    """Words of a few authors: every client uses its own words, most of them rare, and some clients write far more."""

    def __init__(self, seed: int = 0) -> None:
        draws = np.random.default_rng(seed)
        self.sizes = np.array([6, 8, 11, 15, 20, 28, 38, 52, 72, 100])
        features = 24
        blocks = []
        for client, size in enumerate(self.sizes):
            liking = np.where((np.arange(features) + 3 * client) % 8 < 4, 0.25, 0.02)
            liking[:2] = 0.9
            blocks.append((draws.random((size, features)) < liking).astype(np.float64))
        self.x = np.concatenate(blocks)
        truth = draws.normal(size=features) * 1.5
        lean = np.repeat(draws.normal(size=len(self.sizes)), self.sizes)  # clients also lean to one side
        chance = 1 / (1 + np.exp(-(self.x @ truth + 0.5 * lean)))
        self.y = (draws.random(len(self.x)) < chance).astype(np.int64)
        self.federation = Federation(
            torch.from_numpy(self.x),
            torch.from_numpy(self.y),
            np.cumsum([0, *self.sizes]),
            split=ALL_TRAIN,
            classes=("no", "yes"),
        )
        self.task = Task(zeros(features), loss="bce", metrics=[], dtype="float64")

    def loss(self, w: NDArray[np.float64], penalty: float = 0.0) -> float:
        z = (2 * self.y - 1) * (self.x @ w[:-1] + w[-1])
        return float(np.logaddexp(0, -z).mean() + penalty / 2 * w @ w)

    @cached_property
    def optimum(self) -> float:
        from sklearn.linear_model import LogisticRegression

        best = LogisticRegression(C=np.inf, tol=1e-10, max_iter=100_000).fit(self.x, self.y)
        return self.loss(np.append(best.coef_[0], best.intercept_))

    def curve(self, algorithm: Algorithm, rounds: int) -> NDArray[np.float64]:
        """The suboptimality before the first round and after each."""
        best = self.optimum
        found = [self.loss(np.zeros(self.x.shape[1] + 1)) - best]
        # side by side, because steps on single examples are many
        place = Place(self.federation, self.task, probe(self.federation, self.task).setup(group=5))
        backend = InProcess(place, ())
        for record in fit(self.federation, self.task, algorithm, rounds, evaluation=QUIET, backend=backend):
            found.append(self.loss(flat(record.state["model"])) - best)
        return np.array(found)


def zeros(features: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Linear(features, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    return build


def flat(model: Tree) -> NDArray[np.float64]:
    return np.append(model["weight"].numpy().ravel(), model["bias"].numpy())


@pytest.mark.parametrize("seed", slow_after(1, [0, 1, 2]))
def test_fsvrg_approaches_the_optimum_of_a_sparse_unbalanced_problem_in_half_the_rounds_of_fedsgd(seed: int) -> None:
    problem, rounds = Sparse(seed), 5
    # each with the best step of a scan that goes beyond it on both sides
    fedsgd = {lr: problem.curve(make("fedsgd", lr=lr), 2 * rounds) for lr in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
    fsvrg = {h: problem.curve(make("fsvrg", h=h), rounds) for h in (8.0, 32.0, 128.0)}
    best = {}
    for name, curves in (("fedsgd", fedsgd), ("fsvrg", fsvrg)):
        step = min(curves, key=lambda step, of=curves: float(of[step][-1]))
        assert min(curves) < step < max(curves), f"the scan of {name} ends at its best step {step}"
        best[name] = curves[step]
    assert (best["fsvrg"][1:] < best["fsvrg"][:-1]).all(), f"the suboptimality does not fall: {best['fsvrg']}"
    assert best["fsvrg"].min() > 0, "better than the optimum"
    assert best["fsvrg"][-1] < best["fedsgd"][-1], best


# --- CoCoA+


@dataclass(frozen=True)
class Rate:
    """How fast CoCoA+ must be, from Ma et al. 2015 for losses that are 1/μ-smooth, with λ the regularisation.

    A round reduces the dual suboptimality by the factor ρ = 1 − γ (1 − Θ) λμn / (λμn + σ' σ_max), where σ_max is the
    largest squared spectral norm of a client's examples. p passes of dual coordinate ascent leave the share
    Θ = exp(−p λμn / (λμn + σ' r)) of a local problem, r the longest example squared (proved in expectation for draws
    with repetition; walking a permutation is not slower in practice). The primal suboptimality is at most the duality
    gap, and that at most the dual suboptimality / (1 − ρ), because one more round would gain (1 − ρ) of the gap. The
    dual begins at 0, so its suboptimality begins with the value at the optimum.
    """

    blocks: list[NDArray[np.float64]]  # each client's examples, with a feature that is always one
    penalty: float
    mu: float

    def bound(self, rounds: int, aggregation: str, passes: int, optimum: float) -> float:
        clients = len(self.blocks)
        gamma, sigma = (1.0, float(clients)) if aggregation == "adding" else (1 / clients, 1.0)
        scale = self.penalty * self.mu * sum(len(block) for block in self.blocks)
        widest = max(float(np.linalg.norm(block, 2)) ** 2 for block in self.blocks)
        longest = max(float((block**2).sum(1).max()) for block in self.blocks)
        left = np.exp(-passes * scale / (scale + sigma * longest))
        rho = 1 - gamma * (1 - left) * scale / (scale + sigma * widest)
        return float(rho**rounds * optimum / (1 - rho))


def with_ones(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.column_stack([x, np.ones(len(x))])


class Ridge:
    """The value of mean (x·w − y)² + λ/2 ‖w‖², and what it is at best."""

    def __init__(self, world: World, penalty: float) -> None:
        each = [world.examples(world.rows(client)) for client in range(world.population)]
        self.blocks, self.penalty = [with_ones(x) for x, _ in each], penalty
        self.x, self.y = np.concatenate(self.blocks), np.concatenate([y for _, y in each])
        square = self.x.T @ self.x / len(self.x) + penalty / 2 * np.eye(self.x.shape[1])
        self.optimum = self.value(np.linalg.solve(square, self.x.T @ self.y / len(self.x)))

    def value(self, w: NDArray[np.float64]) -> float:
        return float(((self.x @ w - self.y) ** 2).mean() + self.penalty / 2 * w @ w)


SOMETIMES_ABSENT: Sequence[tuple[int, ...]] = ((0, 1, 2), (0, 2), (1, 2), (0, 1, 2), (0, 1), (2,))


@pytest.mark.parametrize("aggregation", ["adding", "averaging"])
@pytest.mark.parametrize("attendance", slow_after(1, ["absences", "everybody"]))
def test_cocoa_approaches_the_optimum_of_ridge_regression_as_fast_as_it_must(attendance: str, aggregation: str) -> None:
    world, rounds, penalty, passes = three_clients(Line()), 120, 1.0, 5
    problem = Ridge(world, penalty)
    rate = Rate(problem.blocks, penalty, mu=0.5)  # a squared error is 2-smooth
    begin = problem.value(np.zeros(problem.x.shape[1])) - problem.optimum
    present = SOMETIMES_ABSENT * (rounds // 6) if attendance == "absences" else ((0, 1, 2),) * rounds
    algorithm = make("cocoa", regularization=penalty, aggregation=aggregation, local_passes=passes)
    sampling, full = Attendance(rounds=tuple(present)), 0
    for record in fit(world.federation, world.task, algorithm, rounds, sampling=sampling, evaluation=QUIET):
        full += len(record.cohort) == 3  # a round that somebody misses cannot lower the dual, but need not raise it
        gap = problem.value(flat(record.state["model"])) - problem.optimum
        assert gap > -1e-12, "better than the optimum"
        bound = rate.bound(full, aggregation, passes, problem.optimum)
        assert gap <= bound, f"after round {record.round}: {gap}, at most {bound}"
    assert bound < 0.1 * begin, "more rounds are needed for a bound that says something"


def test_adding_needs_fewer_rounds_than_averaging() -> None:
    world, penalty = three_clients(Line()), 0.1
    problem, value = Ridge(world, penalty), {}
    for aggregation in ("adding", "averaging"):
        algorithm = make("cocoa", regularization=penalty, aggregation=aggregation, local_passes=5)
        found = model_after(algorithm, world.task, data=world.federation, rounds=12, sampling=Sampling())
        value[aggregation] = problem.value(flat(found))
    assert problem.optimum <= value["adding"] < value["averaging"]


@pytest.mark.slow
def test_cocoa_approaches_the_optimum_of_logistic_regression_as_fast_as_it_must() -> None:
    from sklearn.linear_model import LogisticRegression

    problem, penalty, rounds = Sparse(), 0.5, 80
    inputs = with_ones(problem.x)
    reference = LogisticRegression(C=1 / (penalty * len(inputs)), fit_intercept=False, tol=1e-10, max_iter=100_000)
    best = problem.loss(reference.fit(inputs, problem.y).coef_[0], penalty)
    blocks = np.split(inputs, np.cumsum(problem.sizes)[:-1])
    rate = Rate(blocks, penalty, mu=4.0)  # the logistic loss is 1/4-smooth
    begin = problem.loss(np.zeros(inputs.shape[1]), penalty) - best
    algorithm = make("cocoa", regularization=penalty)
    for record in fit(problem.federation, problem.task, algorithm, rounds, evaluation=QUIET):
        gap = problem.loss(flat(record.state["model"]), penalty) - best
        assert gap > -1e-9, "better than the optimum"
        bound = rate.bound(record.round, "adding", 1, best)
        assert gap <= bound, f"after round {record.round}: {gap}, at most {bound}"
    assert bound < 0.1 * begin, f"more rounds are needed for a bound that says something: {bound} of {begin}"


def test_staged_averaging_takes_no_rule() -> None:
    with pytest.raises(InputError, match="sums of sums"):
        make("staged", rule="median")
