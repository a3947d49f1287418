"""Every algorithm once more, straight from its paper's pseudo-code, in float64 numpy.

Nothing here uses fedloom's arithmetic: models are flat vectors, gradients are derived by hand, and the only thing taken
from fedloom is what a run is given from outside: who holds which rows, and the keys that batch order is drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.federation.sampling import Sampling
from fedloom.task import Task

Vector = NDArray[np.float64]

FEATURES, CLASSES = 6, 3
SEED = 5
EVERYONE_BUT_ONE = ((0, 1, 2), (0, 2), (0, 1, 2))  # who takes part in rounds 1, 2 and 3


# --- models: what torch computes, by hand


class Softmax:
    """A linear classifier: cross-entropy of softmax(W x + b)."""

    leaves: ClassVar[dict[str, tuple[int, ...]]] = {"weight": (CLASSES, FEATURES), "bias": (CLASSES,)}
    buffers: tuple[str, ...] = ()

    def torch(self) -> nn.Module:
        return nn.Linear(FEATURES, CLASSES)

    def parts(self, w: Vector) -> dict[str, Vector]:
        found, begin = {}, 0
        for name, shape in self.leaves.items():
            size = int(np.prod(shape))
            found[name] = w[begin : begin + size].reshape(shape)
            begin += size
        assert begin == len(w)
        return found

    def join(self, parts: dict[str, Vector]) -> Vector:
        return np.concatenate([np.asarray(parts[name], dtype=np.float64).ravel() for name in self.leaves])

    def flatten(self, tree: dict[str, Tensor]) -> Vector:
        return self.join({name: leaf.numpy() for name, leaf in tree.items()})

    def where(self, *prefixes: str) -> NDArray[np.bool_]:
        """Which entries of the flat vector belong to leaves whose names begin so."""
        flags = {name: np.full(shape, name.startswith(prefixes)) for name, shape in self.leaves.items()}
        return self.join(flags).astype(bool)

    @property
    def trainable(self) -> NDArray[np.bool_]:
        return ~self.where(*self.buffers) if self.buffers else self.where("")

    def outputs(self, w: Vector, x: Vector) -> Vector:
        p = self.parts(w)
        return x @ p["weight"].T + p["bias"]

    def losses(self, w: Vector, x: Vector, y: Vector) -> Vector:
        return cross_entropy(self.outputs(w, x), y)

    def correct(self, w: Vector, x: Vector, y: Vector) -> Vector:
        return (self.outputs(w, x).argmax(1) == y).astype(np.float64)

    def gradient(self, w: Vector, x: Vector, y: Vector) -> Vector:
        """Of the mean loss over these examples."""
        error = softmax_error(self.outputs(w, x), y)
        return self.join({"weight": error.T @ x, "bias": error.sum(0)})

    def seen(self, w: Vector, x: Vector) -> Vector:
        """The weights with what their buffers note of a batch in passing."""
        return w


class TwoLayers(Softmax):
    """A body with tanh and a linear head."""

    hidden = 4
    leaves: ClassVar[dict[str, tuple[int, ...]]] = {
        "body.weight": (4, FEATURES),
        "body.bias": (4,),
        "head.weight": (CLASSES, 4),
        "head.bias": (CLASSES,),
    }

    def torch(self) -> nn.Module:
        return TwoLayerNet()

    def outputs(self, w: Vector, x: Vector) -> Vector:
        p = self.parts(w)
        return np.tanh(x @ p["body.weight"].T + p["body.bias"]) @ p["head.weight"].T + p["head.bias"]

    def gradient(self, w: Vector, x: Vector, y: Vector, kept: Vector | float = 1.0) -> Vector:
        """`kept` is 0 for hidden units that a sub-model does not have."""
        p = self.parts(w)
        hidden = np.tanh(x @ p["body.weight"].T + p["body.bias"])
        error = softmax_error((hidden * kept) @ p["head.weight"].T + p["head.bias"], y)
        back = (error @ p["head.weight"]) * kept * (1 - hidden**2)
        return self.join(
            {
                "body.weight": back.T @ x,
                "body.bias": back.sum(0),
                "head.weight": error.T @ (hidden * kept),
                "head.bias": error.sum(0),
            }
        )


class TwoLayerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Normed(Softmax):
    """Batch normalisation of the inputs, then a linear classifier."""

    leaves: ClassVar[dict[str, tuple[int, ...]]] = {
        "norm.weight": (FEATURES,),
        "norm.bias": (FEATURES,),
        "out.weight": (CLASSES, FEATURES),
        "out.bias": (CLASSES,),
        "norm.running_mean": (FEATURES,),
        "norm.running_var": (FEATURES,),
        "norm.num_batches_tracked": (),
    }
    buffers = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")

    def torch(self) -> nn.Module:
        return NormedNet()

    def normalised(self, x: Vector) -> Vector:
        return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)

    def outputs(self, w: Vector, x: Vector) -> Vector:
        """In evaluation, where the noted statistics are used."""
        p = self.parts(w)
        z = (x - p["norm.running_mean"]) / np.sqrt(p["norm.running_var"] + 1e-5)
        return (z * p["norm.weight"] + p["norm.bias"]) @ p["out.weight"].T + p["out.bias"]

    def gradient(self, w: Vector, x: Vector, y: Vector) -> Vector:
        p, z = self.parts(w), self.normalised(x)
        inputs = z * p["norm.weight"] + p["norm.bias"]
        error = softmax_error(inputs @ p["out.weight"].T + p["out.bias"], y)
        back = error @ p["out.weight"]
        none = {name: np.zeros(self.leaves[name]) for name in self.buffers}
        return self.join(
            {
                **none,
                "norm.weight": (back * z).sum(0),
                "norm.bias": back.sum(0),
                "out.weight": error.T @ inputs,
                "out.bias": error.sum(0),
            }
        )

    def seen(self, w: Vector, x: Vector) -> Vector:
        p = {name: part.copy() for name, part in self.parts(w).items()}
        p["norm.running_mean"] += 0.1 * (x.mean(0) - p["norm.running_mean"])
        p["norm.running_var"] += 0.1 * (x.var(0, ddof=1) - p["norm.running_var"])
        p["norm.num_batches_tracked"] += 1
        return self.join(p)


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Line(Softmax):
    """A linear regression with squared errors; it starts at zero."""

    leaves: ClassVar[dict[str, tuple[int, ...]]] = {"weight": (1, FEATURES), "bias": (1,)}

    def torch(self) -> nn.Module:
        model = nn.Linear(FEATURES, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def outputs(self, w: Vector, x: Vector) -> Vector:
        p = self.parts(w)
        return x @ p["weight"][0] + p["bias"]

    def losses(self, w: Vector, x: Vector, y: Vector) -> Vector:
        return (self.outputs(w, x) - y) ** 2

    def gradient(self, w: Vector, x: Vector, y: Vector) -> Vector:
        error = 2 * (self.outputs(w, x) - y) / len(y)
        return self.join({"weight": error @ x, "bias": error.sum()})


def cross_entropy(outputs: Vector, y: Vector) -> Vector:
    top = outputs.max(1)
    return np.log(np.exp(outputs - top[:, None]).sum(1)) + top - outputs[np.arange(len(y)), y.astype(int)]


def softmax_error(outputs: Vector, y: Vector) -> Vector:
    """The gradient of the mean cross-entropy by the outputs."""
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y.astype(int)] -= 1
    return p / len(y)


# --- the world: three clients with 5, 12 and 7 training examples, and what they may be asked


class Attendance(Sampling):
    """Who takes part is written down, not drawn."""

    rounds: tuple[tuple[int, ...], ...]

    def draw(self, population: int, round: int, seed: int) -> tuple[int, ...]:
        return self.rounds[round - 1]


@dataclass(frozen=True)
class World:
    """A federation, a model, and how clients train."""

    federation: Federation
    model: Softmax
    loss: str = "cross_entropy"
    metrics: tuple[str, ...] = ("accuracy",)
    rounds: tuple[tuple[int, ...], ...] = EVERYONE_BUT_ONE
    lr: float = 0.2
    batch: int | None = 3  # None: all examples
    epochs: int = 2
    momentum: float = 0.0
    calls: tuple[int, ...] = (0,)  # the server's calls, counted within a round, in which clients draw an order
    purpose: str = "batches"  # what they draw it for

    @property
    def task(self) -> Task:
        return Task(self.model.torch, loss=self.loss, metrics=self.metrics, dtype="float64")

    @property
    def training(self) -> dict[str, Any]:
        """The same for fedloom."""
        size = "full" if self.batch is None else self.batch
        return {"lr": self.lr, "batch_size": size, "epochs": float(self.epochs), "momentum": self.momentum}

    @property
    def population(self) -> int:
        return self.federation.clients

    def start(self) -> Vector:
        return self.model.flatten(self.task.initial())

    def rows(self, client: int, split: str = "train") -> NDArray[np.int64]:
        return self.federation.indices(client, split).numpy()  # type: ignore[arg-type]

    def examples(self, rows: NDArray[np.int64]) -> tuple[Vector, Vector]:
        return self.federation.x[rows].numpy(), self.federation.y[rows].numpy()

    def size(self, client: int) -> int:
        return len(self.rows(client))

    def shares(self, cohort: Sequence[int], weights: str) -> Vector:
        counts = np.array([self.size(client) if weights == "examples" else 1 for client in cohort], dtype=np.float64)
        return counts / counts.sum()

    def order(self, client: int, round: int, epoch: int, stage: int = 0) -> NDArray[np.int64]:
        """A client's rows as they are walked in one epoch; `stage` counts the trainings of a round."""
        call = self.calls[min(stage, len(self.calls) - 1)]
        rows = self.rows(client)
        return rows[keys.permutation(keys.key(SEED, self.purpose, round, call, client, epoch), len(rows))]

    def batches(self, client: int, round: int, epochs: int | None = None, stage: int = 0) -> list[NDArray[np.int64]]:
        """ClientUpdate's "B ← split P_k into batches of size B", for all epochs."""
        if self.batch is None:
            return [self.rows(client)] * (epochs or self.epochs)
        cut = []
        for epoch in range(epochs or self.epochs):
            order = self.order(client, round, epoch, stage)
            cut += [order[begin : begin + self.batch] for begin in range(0, len(order), self.batch)]
        return cut

    def gradient(self, w: Vector, rows: NDArray[np.int64]) -> Vector:
        return self.model.gradient(w, *self.examples(rows))

    def full_gradient(self, w: Vector, client: int) -> Vector:
        return self.gradient(w, self.rows(client))

    def training_loss(self, w: Vector, client: int) -> float:
        return float(self.model.losses(w, *self.examples(self.rows(client))).mean())

    def score(self, w: Vector, client: int, metric: str) -> float:
        measure = self.model.correct if metric == "accuracy" else self.model.losses
        return float(measure(w, *self.examples(self.rows(client, "validation"))).mean())

    def descend(
        self,
        start: Vector,
        client: int,
        round: int,
        change: Callable[[Vector, Vector, NDArray[np.int64]], Vector] | None = None,
        *,
        epochs: int | None = None,
        stage: int = 0,
    ) -> tuple[Vector, int]:
        """Local SGD (with momentum): the trained weights and the number of steps. `change(g, w, rows)` is a hook."""
        w, velocity, steps = start.copy(), np.zeros_like(start), 0
        for rows in self.batches(client, round, epochs, stage):
            g = self.gradient(w, rows)
            if change is not None:
                g = change(g, w, rows)
            velocity = self.momentum * velocity + g * self.model.trainable
            w = self.model.seen(w - self.lr * velocity, self.examples(rows)[0])
            steps += 1
        return w, steps


def three_clients(model: Softmax | None = None, **settings: Any) -> World:
    """Sparse features, of which one is missing on client 0 and one on everybody; client 1 sees other labels."""
    model = model or Softmax()
    draws = np.random.default_rng(3)
    sizes = (9, 20, 13)
    offsets = np.cumsum([0, *sizes])
    x = draws.normal(size=(sum(sizes), FEATURES)) * (draws.random((sum(sizes), FEATURES)) < 0.6)
    x[: sizes[0], 4] = 0.0
    x[:, 5] = 0.0
    truth = draws.normal(size=(FEATURES, CLASSES))
    y = (x @ truth + draws.normal(size=(sum(sizes), CLASSES))).argmax(1)
    y[offsets[1] : offsets[2]] = (y[offsets[1] : offsets[2]] + 1) % CLASSES
    if isinstance(model, Line):
        numbers = torch.from_numpy(x @ truth[:, 0] + 0.3 * draws.normal(size=len(x)))
        data = Federation(torch.from_numpy(x), numbers, offsets)
        return World(data, model, "mse", ("mse",), **{"lr": 0.05, **settings})
    data = Federation(torch.from_numpy(x), torch.from_numpy(y), offsets, classes=("a", "b", "c"))
    return World(data, model, **settings)


def five_clients(**settings: Any) -> World:
    """Enough for a ring that is not everybody."""
    draws = np.random.default_rng(4)
    sizes = (10, 7, 16, 12, 9)
    x = draws.normal(size=(sum(sizes), FEATURES))
    y = draws.integers(0, CLASSES, sum(sizes))
    data = Federation(torch.from_numpy(x), torch.from_numpy(y), np.cumsum([0, *sizes]), classes=("a", "b", "c"))
    return World(data, Softmax(), **{"rounds": (tuple(range(5)),) * 3, **settings})


def yes_or_no(**settings: Any) -> World:
    """Two classes from one output."""
    world = three_clients(Line())
    y = (world.federation.y > world.federation.y.median()).long()
    both = replace(world.federation, y=y, classes=("no", "yes"))
    return replace(world, federation=both, loss="bce", metrics=("accuracy",), **settings)


def hopeless() -> World:
    """Validation examples of a class that is in nobody's training split: every accuracy is zero."""
    world = three_clients()
    y = world.federation.y % 2
    for client in range(3):
        y[world.federation.indices(client, "validation")] = 2
    return replace(world, federation=replace(world.federation, y=y), epochs=8)


def two_kinds(model: Softmax | None = None, **settings: Any) -> World:
    """Client 1's labels contradict those of the others, so that it likes another model best."""
    world = three_clients(model, **settings)
    y = world.model.outputs(world.start(), world.federation.x.numpy()).argmax(1)
    y[9:29] = (y[9:29] + 1) % CLASSES
    return replace(world, federation=replace(world.federation, y=torch.from_numpy(y)))


def perfect() -> World:
    """A regression that client 0 solves exactly in round 1: its error is zero."""
    world = three_clients(Line())
    y = world.federation.y.clone()
    y[:9] = 0.0
    return replace(world, federation=replace(world.federation, y=y))


# --- the transcriptions


@dataclass(frozen=True)
class Expected:
    """What there is after the last round: the global model, and the models of clients where they have their own."""

    server: Vector | None = None
    clients: dict[int, Vector] = field(default_factory=dict)
    compare: NDArray[np.bool_] | None = None  # entries of the global model that mean something


def mean(trained: Sequence[Vector], shares: Vector) -> Vector:
    return np.sum([share * w for share, w in zip(shares, trained, strict=True)], axis=0)


def scored_shares(scores: Sequence[float], rule: str, higher_is_better: bool) -> Vector:
    """Samani's rules 4 and 5: a row of weights from a row of evaluations."""
    e = np.array(scores, dtype=np.float64)
    if rule == "score":
        row = e if higher_is_better else 1 / np.where(e == 0, 1e-6, e)
        return row / row.sum() if row.sum() > 0 else np.full(len(e), 1 / len(e))
    assert rule == "within_std"
    slack = 1e-9  # of two clients the worse is exactly one standard deviation below the mean: rounding must not decide
    if higher_is_better:
        inside = e >= e.mean() - e.std() - slack
    else:
        inside = e <= e.mean() + e.std() + slack
    return inside / inside.sum()


def fedavg(
    world: World, weights: str = "examples", metric: str = "accuracy", scores: str = "post", **_: Any
) -> Expected:
    """McMahan et al. 2017, Algorithm 1; the shares of Samani 2020 where asked."""
    w = world.start()
    for round, cohort in enumerate(world.rounds, 1):
        trained = [world.descend(w, k, round)[0] for k in cohort]
        if weights in ("examples", "uniform"):
            shares = world.shares(cohort, weights)
        else:
            judged = trained if scores == "post" else [w] * len(cohort)
            found = [world.score(v, k, metric) for v, k in zip(judged, cohort, strict=True)]
            shares = scored_shares(found, weights, metric == "accuracy")
        w = whole(world, mean(trained, shares))
    return Expected(w)


def whole(world: World, w: Vector) -> Vector:
    """Counters are averaged to whole numbers."""
    counter = world.model.where("norm.num_batches_tracked") if world.model.buffers else np.zeros(len(w), bool)
    return np.where(counter, np.rint(w), w)


def with_buffers(world: World, w: Vector, trained: Sequence[Vector], shares: Vector) -> Vector:
    """Whatever a server does to parameters, it averages buffers."""
    return whole(world, np.where(world.model.trainable, w, mean(trained, shares)))


def evaluation_weighted(world: World, **settings: Any) -> Expected:
    return fedavg(world, weights="score", **settings)


def selective(world: World, **settings: Any) -> Expected:
    return fedavg(world, weights="within_std", **settings)


def fedavg_keeping_momentum(world: World, momentum: float, **_: Any) -> Expected:
    """Clients whose optimiser is never reset: an absent client's velocity waits for it."""
    w = world.start()
    velocity = {k: np.zeros_like(w) for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        trained = []
        for k in cohort:
            local = w.copy()
            for rows in world.batches(k, round):
                velocity[k] = momentum * velocity[k] + world.gradient(local, rows)
                local = local - world.lr * velocity[k]
            trained.append(local)
        w = mean(trained, world.shares(cohort, "examples"))
    return Expected(w)


def fedsgd(world: World) -> Expected:
    """McMahan et al. 2017, section 2: w ← w − η Σ (n_k/n) ∇F_k(w)."""
    w = world.start()
    for cohort in world.rounds:
        shares = world.shares(cohort, "examples")
        seen = [world.model.seen(w, world.examples(world.rows(k))[0]) for k in cohort]
        stepped = w - world.lr * mean([world.full_gradient(w, k) for k in cohort], shares)
        w = with_buffers(world, stepped, seen, shares)
    return Expected(w)


def local_only(world: World) -> Expected:
    models = {k: world.start() for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        for k in cohort:
            models[k] = world.descend(models[k], k, round)[0]
    return Expected(None, models)


def pooled(world: World) -> Expected:
    """One client that owns everything, whose optimiser is never reset."""
    w, velocity = world.start(), np.zeros_like(world.start())
    for round in range(1, len(world.rounds) + 1):
        for rows in world.batches(world.federation.everyone, round):
            velocity = world.momentum * velocity + world.gradient(w, rows)
            w = w - world.lr * velocity
    return Expected(w)


def fedprox(world: World, mu: float) -> Expected:
    """Li et al. 2020: h_k(w; w_t) = F_k(w) + μ/2 ‖w − w_t‖²."""
    w = world.start()
    for round, cohort in enumerate(world.rounds, 1):
        start = w
        trained = [world.descend(w, k, round, lambda g, v, _, s=start: g + mu * (v - s))[0] for k in cohort]
        w = whole(world, mean(trained, world.shares(cohort, "examples")))
    return Expected(w)


def fedbn(world: World) -> Expected:
    """Li et al. 2021, Algorithm 1: every layer is averaged but normalisation, which each client keeps."""
    local = world.model.where("norm.")
    w = world.start()
    kept = dict.fromkeys(range(world.population), w[local])
    for round, cohort in enumerate(world.rounds, 1):
        trained = []
        for k in cohort:
            begin = w.copy()
            begin[local] = kept[k]
            trained.append(world.descend(begin, k, round)[0])
            kept[k] = trained[-1][local]
        w = mean(trained, world.shares(cohort, "examples"))
    clients = {k: np.where(local, 0.0, w) for k in range(world.population)}
    for k, model in clients.items():
        model[local] = kept[k]
    return Expected(w, clients, compare=~local)


def fedavgm(world: World, server_lr: float, server_momentum: float) -> Expected:
    """Hsu et al. 2019: v ← β v + Δ, w ← w + η v."""
    w = world.start()
    v = np.zeros_like(w)
    for round, cohort in enumerate(world.rounds, 1):
        shares, trained = world.shares(cohort, "examples"), [world.descend(w, k, round)[0] for k in cohort]
        v = server_momentum * v + mean(trained, shares) - w
        w = with_buffers(world, w + server_lr * v, trained, shares)
    return Expected(w)


def fedopt(
    kind: str,
) -> Callable[..., Expected]:
    """Reddi et al. 2021, Algorithm 2, without bias correction; buffers are no parameters and are averaged."""

    def transcription(
        world: World,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-9,
        bias_correction: bool = False,
        weights: str = "uniform",
    ) -> Expected:
        w = world.start()
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, cohort in enumerate(world.rounds, 1):
            average = mean([world.descend(w, k, t)[0] for k in cohort], world.shares(cohort, weights))
            change = average - w
            m = beta1 * m + (1 - beta1) * change
            if kind == "adagrad":
                v = v + change**2
            elif kind == "yogi":
                v = v - (1 - beta2) * change**2 * np.sign(v - change**2)
            else:
                v = beta2 * v + (1 - beta2) * change**2
            rate = server_lr * np.sqrt(1 - beta2**t) / (1 - beta1**t) if bias_correction else server_lr
            w = whole(world, np.where(world.model.trainable, w + rate * m / (np.sqrt(v) + tau), average))
        return Expected(w)

    return transcription


def fsvrg(world: World, h: float | None = None, scaling: str = "auto") -> Expected:
    """Konečný et al. 2016, Algorithm 4; frequencies count non-zeros in training examples of the cohort."""
    w, h = world.start(), world.lr if h is None else h
    for round, cohort in enumerate(world.rounds, 1):
        shares = world.shares(cohort, "examples")
        full = mean([world.full_gradient(w, k) for k in cohort], shares)
        has = {k: world.examples(world.rows(k))[0] != 0 for k in cohort}
        overall = np.concatenate(list(has.values())).mean(0)  # φ_j
        holders = np.sum([has[k].any(0) for k in cohort], axis=0)  # ω_j
        a = np.array([len(cohort) / o if o else 1.0 for o in holders])
        changes = []
        for k in cohort:
            of_client = has[k].mean(0)  # φ_kj
            s = np.array([f / g if g else 1.0 for f, g in zip(overall, of_client, strict=True)])
            scale = by_feature(world, s) if scaling == "auto" else 1.0
            local, step = w.copy(), h / world.size(k)
            for i in world.order(k, round, 0):
                i = np.array([i])
                local = local - step * (scale * (world.gradient(local, i) - world.gradient(w, i)) + full)
            changes.append(local - w)
        w = w + (by_feature(world, a) if scaling == "auto" else 1.0) * mean(changes, shares)
    return Expected(w)


def by_feature(world: World, factors: Vector) -> Vector:
    """One factor per feature for every class; 1 for the intercept."""
    shape = world.model.leaves["weight"]
    return world.model.join({"weight": np.broadcast_to(factors, shape), "bias": np.ones(shape[0])})


def svrg(world: World, h: float | None = None) -> Expected:
    """Johnson and Zhang 2013 on everybody's examples, one pass in random order, with the step h/n."""
    w, everyone = world.start(), world.federation.everyone
    h = world.lr if h is None else h
    for round in range(1, len(world.rounds) + 1):
        full = world.full_gradient(w, everyone)
        local = w.copy()
        for i in world.order(everyone, round, 0):
            i = np.array([i])
            local = local - h / world.size(everyone) * (world.gradient(local, i) - world.gradient(w, i) + full)
        w = local
    return Expected(w)


def cocoa(
    world: World, regularization: float = 0.01, aggregation: str = "adding", local_passes: int = 1, **_: Any
) -> Expected:
    """Ma et al. 2015 (CoCoA+), Algorithms 1 and 2, with exact coordinate steps; w = Σ α_i x_i / (λ n)."""
    lam = regularization
    n = sum(world.size(k) for k in range(world.population))
    w = np.zeros(FEATURES + 1)
    alpha = {k: np.zeros(len(world.federation.y)) for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        gamma, sigma = (1.0, float(len(cohort))) if aggregation == "adding" else (1 / len(cohort), 1.0)
        change = np.zeros_like(w)
        for k in cohort:
            delta, u = np.zeros_like(alpha[k]), w.copy()
            for epoch in range(local_passes):
                for i in world.order(k, round, epoch):
                    x, y = world.examples(np.array([i]))
                    x = np.append(x[0], 1.0)
                    step = coordinate_step(world.loss, alpha[k][i] + delta[i], x @ u, y[0], sigma * x @ x / (lam * n))
                    delta[i] += step
                    u = u + sigma / (lam * n) * step * x
            alpha[k] = alpha[k] + gamma * delta
            change += (u - w) / sigma
        w = w + gamma * change
    return Expected(w)


def coordinate_step(loss: str, a: float, z: float, y: float, curvature: float) -> float:
    """The step that maximises −ℓ*(−(a + step)) − z·step − curvature/2·step², ℓ* the loss's conjugate."""
    if loss == "mse":  # ℓ(z) = (z − y)², ℓ*(−a) = a²/4 − a y
        return (y - z - a / 2) / (0.5 + curvature)
    sign = (
        2.0 * y - 1.0
    )  # ℓ(z) = log(1 + exp(−sign z)), ℓ*(−a) = b log b + (1 − b) log(1 − b) with b = sign·a in [0, 1]
    b, low, high = sign * a, 0.0, 1.0

    def slope(p: float) -> float:
        return -np.log(p / (1 - p)) - sign * z - curvature * (p - b)

    for _ in range(200):  # the slope falls from +∞ to −∞
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return sign * ((low + high) / 2 - b)


def scaffold(world: World, server_lr: float = 1.0, weights: str = "uniform") -> Expected:
    """Karimireddy et al. 2020, Algorithm 1 with option II."""
    x = world.start()
    c, own = np.zeros_like(x), {k: np.zeros_like(x) for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        models, controls, trained = [], [], []
        for k in cohort:
            y, steps = world.descend(x, k, round, lambda g, _w, _r, k=k, c=c: g - own[k] + c)
            plus = own[k] - c + (x - y) / (steps * world.lr)
            models.append(y - x)
            trained.append(y)
            controls.append(plus - own[k])
            own[k] = plus
        shares = world.shares(cohort, weights)
        x = with_buffers(world, x + server_lr * mean(models, shares), trained, shares)
        c = c + len(cohort) / world.population * np.mean(controls, axis=0)
    return Expected(x)


def feddc(world: World, alpha: float = 0.01, weights: str = "examples") -> Expected:
    """Gao et al. 2022: the penalty on drift and distance, the gradient correction, and the mean drift on the server."""
    w = world.start()
    mean_update = np.zeros_like(w)  # g, divided by K and η of the round it comes from
    mean_drift = np.zeros_like(w)
    drift = {k: np.zeros_like(w) for k in range(world.population)}
    update = {k: np.zeros_like(w) for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        moved, trained = [], []
        for k in cohort:

            def change(g: Vector, at: Vector, _: Any, k: int = k, w: Vector = w, mean: Vector = mean_update) -> Vector:
                return g + alpha * (drift[k] + at - w) + (update[k] - mean)

            theta, steps = world.descend(w, k, round, change)
            moved.append((theta - w) * world.model.trainable)
            drift[k] = drift[k] + moved[-1]
            update[k] = moved[-1] / (steps * world.lr)
            trained.append(theta)
        shares = world.shares(cohort, weights)
        mean_drift = mean_drift + len(cohort) / world.population * mean(moved, shares)
        w = with_buffers(world, mean(trained, shares) + mean_drift, trained, shares)
        mean_update = mean([update[k] for k in cohort], shares)
    return Expected(w)


def moon(world: World, mu: float = 1.0, temperature: float = 0.5, weights: str = "examples") -> Expected:
    """Li et al. 2021, Algorithm 1 with equation 3, whose gradient goes through the body's tanh."""
    w = world.start()
    previous = dict.fromkeys(range(world.population), w)

    def contrast(at: Vector, rows: NDArray[np.int64], near: Vector, far: Vector) -> Vector:
        x, _ = world.examples(rows)
        if not isinstance(world.model, TwoLayers):
            return np.zeros_like(at)  # nothing is before the last layer
        z, z_near, z_far = (hidden(v, x) for v in (at, near, far))
        (a, da), (b, db) = cosine(z, z_far), cosine(z, z_near)
        slope = mu / len(x) / temperature / (1 + np.exp((b - a) / temperature))
        back = slope[:, None] * (da - db) * (1 - z**2)
        zeros = {name: np.zeros(shape) for name, shape in world.model.leaves.items()}
        return world.model.join({**zeros, "body.weight": back.T @ x, "body.bias": back.sum(0)})

    def hidden(v: Vector, x: Vector) -> Vector:
        p = world.model.parts(v)
        return np.tanh(x @ p["body.weight"].T + p["body.bias"])

    def cosine(z: Vector, u: Vector) -> tuple[Vector, Vector]:
        """The cosine of each row, and its derivative by z."""
        lengths = np.linalg.norm(z, axis=1) * np.linalg.norm(u, axis=1)
        cos = (z * u).sum(1) / lengths
        return cos, u / lengths[:, None] - (cos / (z**2).sum(1))[:, None] * z

    for round, cohort in enumerate(world.rounds, 1):
        trained = []
        for k in cohort:
            near, far = w, previous[k]
            local, _ = world.descend(
                w, k, round, lambda g, at, rows, near=near, far=far: g + contrast(at, rows, near, far)
            )
            previous[k] = local
            trained.append(local)
        w = whole(world, mean(trained, world.shares(cohort, weights)))
    return Expected(w)


def fednova(world: World, **_: Any) -> Expected:
    """Wang et al. 2020, equations 3, 4 and 6: a_i from how often each gradient entered the local change."""
    w = world.start()
    for round, cohort in enumerate(world.rounds, 1):
        shares, norms, directions, trained = world.shares(cohort, "examples"), [], [], []
        for k in cohort:
            local, steps = world.descend(w, k, round)
            # the gradient of step s entered every velocity from s on, each time discounted once more
            a = [sum(world.momentum**later for later in range(steps - s)) for s in range(steps)]
            norms.append(sum(a))
            directions.append((w - local) / sum(a))
            trained.append(local)
        new = w - float(shares @ np.array(norms)) * mean(directions, shares)
        w = with_buffers(world, new, trained, shares)
    return Expected(w)


def feddyn(world: World, alpha: float = 0.1) -> Expected:
    """Acar et al. 2021, Algorithm 1: g_k stands for ∇L_k at the client's last model."""
    w = world.start()
    h, last = np.zeros_like(w), {k: np.zeros_like(w) for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        models = []
        for k in cohort:
            local, _ = world.descend(w, k, round, lambda g, v, _r, k=k, w=w: g - last[k] + alpha * (v - w))
            last[k] = last[k] - alpha * (local - w)
            models.append(local)
        h = h - alpha / world.population * np.sum([local - w for local in models], axis=0)
        w = with_buffers(world, np.mean(models, axis=0) - h / alpha, models, world.shares(cohort, "uniform"))
    return Expected(w)


def qfedavg(world: World, q: float, weights: str = "uniform", **_: Any) -> Expected:
    """Li et al. 2020 (q-FFL), Algorithm 2 with L = 1/η; there clients are drawn by p_k instead of being weighted."""
    w, lipschitz = world.start(), 1 / world.lr
    for round, cohort in enumerate(world.rounds, 1):
        shares, deltas, steps, trained, pull = world.shares(cohort, weights), [], [], [], []
        for k in cohort:
            loss = world.training_loss(w, k)
            trained.append(world.descend(w, k, round)[0])
            change = lipschitz * (w - trained[-1]) * world.model.trainable
            deltas.append(loss**q * change)
            steps.append(q * loss ** (q - 1) * float(change @ change) + lipschitz * loss**q)
            pull.append(loss**q)
        new = w - mean(deltas, shares) / float(shares @ np.array(steps))
        heard = shares * np.array(pull)  # buffers are no parameters: they are averaged as much as a client counts
        w = with_buffers(world, new, trained, heard / heard.sum())
    return Expected(w)


def ditto(world: World, lam: float) -> Expected:
    """Li et al. 2021 (Ditto), Algorithm 1: v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w))."""
    w = world.start()
    own = {k: world.start() for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        trained = [world.descend(w, k, round)[0] for k in cohort]
        for k in cohort:
            own[k] = world.descend(own[k], k, round, lambda g, v, _r, w=w: g + lam * (v - w), stage=1)[0]
        w = whole(world, mean(trained, world.shares(cohort, "examples")))
    return Expected(w, own)


def perfedavg(world: World, alpha: float) -> Expected:
    """Fallah et al. 2020, the first-order variant, on one batch: w ← w − β ∇f(w − α ∇f(w))."""
    w = world.start()
    for round, cohort in enumerate(world.rounds, 1):
        trained = [
            world.descend(w, k, round, lambda g, v, rows: world.gradient(v - alpha * g, rows))[0] for k in cohort
        ]
        w = whole(world, mean(trained, world.shares(cohort, "examples")))
    return Expected(w)


def fedrep(world: World, head_epochs: float = 1.0, head: tuple[str, ...] = ()) -> Expected:
    """Collins et al. 2021, Algorithm 1: first the head against the received body, then the body against that head."""
    is_head = world.model.where(*(head or ("head.",)))
    w = world.start()
    heads = dict.fromkeys(range(world.population), w[is_head])
    for round, cohort in enumerate(world.rounds, 1):
        trained = []
        for k in cohort:
            begin = w.copy()
            begin[is_head] = heads[k]
            ready = world.descend(begin, k, round, lambda g, _v, _r: g * is_head, epochs=int(head_epochs))[0]
            begin[is_head] = ready[is_head]  # what buffers noted meanwhile is not of the body's training
            trained.append(world.descend(begin, k, round, lambda g, _v, _r: g * ~is_head, stage=1)[0])
            heads[k] = trained[-1][is_head]
        w = whole(world, mean(trained, world.shares(cohort, "examples")))
    clients = {k: w.copy() for k in range(world.population)}
    for k, model in clients.items():
        model[is_head] = heads[k]
    return Expected(w, clients, compare=~is_head)


def ifca(world: World, clusters: int = 2) -> Expected:
    """Ghosh et al. 2020, Algorithm 1 with model averaging."""
    models = [world.model.flatten(replace(world.task, seed=world.task.seed + j).initial()) for j in range(clusters)]
    last: dict[int, int] = {}
    for round, cohort in enumerate(world.rounds, 1):
        chosen = {k: int(np.argmin([world.training_loss(model, k) for model in models])) for k in cohort}
        trained = {k: world.descend(models[chosen[k]], k, round)[0] for k in cohort}
        for j in range(clusters):
            members = [k for k in cohort if chosen[k] == j]
            if members:
                models[j] = whole(world, mean([trained[k] for k in members], world.shares(members, "examples")))
        last.update(chosen)
    assert len(set(last.values())) > 1, "a test of clusters needs clients that differ"
    return Expected(None, {k: models[j] for k, j in last.items()})


def peer(
    world: World,
    weights: str = "uniform",
    metric: str = "accuracy",
    topology: str = "full",
    scores: str = "post",
    **_: Any,
) -> Expected:
    """Samani 2020, peer to peer: everybody judges everybody's weights on its own validation split."""
    models = {k: world.start() for k in range(world.population)}
    for round, cohort in enumerate(world.rounds, 1):
        trained = [world.descend(models[k], k, round)[0] for k in cohort]
        judged = trained if scores == "post" else [models[k].copy() for k in cohort]
        m = len(cohort)
        edges = {
            "full": lambda i, j: i != j,
            "ring": lambda i, j, m=m: (i - j) % m in (1, m - 1),
            "star": lambda i, j: (i == 0) != (j == 0),
        }[topology]
        degree = [sum(edges(i, j) for j in range(m)) for i in range(m)]
        for i, k in enumerate(cohort):
            heard = [j for j in range(m) if j == i or edges(i, j)]
            if weights == "metropolis":
                row = np.array([0.0 if j == i else 1 / (1 + max(degree[i], degree[j])) for j in heard])
                row[heard.index(i)] = 1 - row.sum()
            elif weights == "uniform":
                row = np.full(len(heard), 1 / len(heard))
            else:
                found = [world.score(judged[j], k, metric) for j in heard]
                row = scored_shares(found, weights, metric == "accuracy")
            models[k] = whole(world, mean([trained[j] for j in heard], row))
    return Expected(None, models)


def staged(world: World, groups: int = 2, weights: str = "examples") -> Expected:
    """Averages of averages: each group first, then the groups by what they weigh."""
    w = world.start()
    for round, cohort in enumerate(world.rounds, 1):
        means, masses = [], []
        for group in range(groups):
            members = cohort[group::groups]
            if members:
                trained = [world.descend(w, k, round)[0] for k in members]
                means.append(mean(trained, world.shares(members, weights)))
                masses.append(sum(world.size(k) if weights == "examples" else 1 for k in members))
        w = whole(world, mean(means, np.array(masses) / sum(masses)))
    return Expected(w)


# --- which transcription answers for which settings of which algorithm


@dataclass(frozen=True)
class Case:
    name: str  # in ALGORITHMS
    transcription: Callable[..., Expected]
    settings: dict[str, Any] = field(default_factory=dict)
    world: Callable[[], World] = three_clients
    more: dict[str, Any] = field(default_factory=dict)  # for fedloom only

    @property
    def label(self) -> str:
        shown = {**self.settings, **self.more}
        kind = "" if self.world is three_clients else getattr(self.world, "label", self.world.__name__)
        return "-".join([self.name, *([kind] if kind else []), *(f"{name}={value}" for name, value in shown.items())])


def on(model: type[Softmax], made: Callable[..., World] = three_clients, **settings: Any) -> Callable[[], World]:
    def world() -> World:
        return made(model(), **settings)

    shown = {**settings, **({"rounds": "everybody"} if "rounds" in settings else {})}
    world.label = ",".join([model.__name__.lower(), *(f"{n}={v}" for n, v in shown.items())])  # type: ignore[attr-defined]
    return world


EVERYBODY = ((0, 1, 2),) * 3


def yes_or_no_from_everybody() -> World:
    return yes_or_no(rounds=EVERYBODY)


NORMED = on(Normed, batch=5)  # no batch of one example, whose variance is not defined
NORMED_KINDS = on(Normed, made=two_kinds, batch=5)
ONE_PASS = on(Softmax, batch=1, epochs=1)
FULL_BATCH = on(Softmax, batch=None, epochs=1)
LOSS = {"metric": "loss"}

CASES = [
    Case("fedavg", fedavg),
    Case("fedavg", fedavg, world=FULL_BATCH),
    Case("fedavg", fedavg, world=on(TwoLayers)),
    Case("fedavg", fedavg, world=NORMED),
    Case("fedavg", fedavg, {"weights": "uniform"}),
    *(
        Case(name, by_score, {"scores": scores, **metric})
        for name, by_score in (("evaluation_weighted", evaluation_weighted), ("selective", selective))
        for scores in ("post", "pre")
        for metric in ({}, LOSS)
    ),
    Case("evaluation_weighted", evaluation_weighted, {}, hopeless),
    Case("evaluation_weighted", evaluation_weighted, {"metric": "mse"}, perfect),
    Case("fedavg", fedavg_keeping_momentum, {"momentum": 0.5, "optimizer_state": "keep"}),
    Case("fedsgd", fedsgd),
    Case("local", local_only),
    Case("pooled", pooled),
    Case("pooled", pooled, world=on(Softmax, momentum=0.5)),
    Case("fedprox", fedprox, {"mu": 0.3}),
    Case("fedbn", fedbn, world=NORMED),
    Case("fedavgm", fedavgm, {"server_lr": 0.7, "server_momentum": 0.6}),
    *(
        Case(f"fed{kind}", fedopt(kind), settings, world)
        for kind in ("adagrad", "adam", "yogi")
        for settings, world in (
            ({}, three_clients),
            ({"server_lr": 0.1, "beta1": 0.5, "tau": 0.01, "weights": "examples"}, three_clients),
            ({"beta1": 0.0}, three_clients),
            ({}, NORMED),
        )
    ),
    Case("fedadam", fedopt("adam"), {"bias_correction": True, "beta2": 0.95}),
    Case("fedyogi", fedopt("yogi"), {"beta2": 0.6}),
    Case("fsvrg", fsvrg, world=ONE_PASS),
    Case("fsvrg", fsvrg, {"scaling": "identity"}, ONE_PASS),
    Case("fsvrg", fsvrg, world=on(Line, batch=1, epochs=1)),
    Case("fsvrg", lambda world: fsvrg(world, scaling="identity"), world=on(TwoLayers, batch=1, epochs=1)),
    Case("svrg", svrg, world=ONE_PASS),
    Case("svrg", svrg, world=on(TwoLayers, batch=1, epochs=1)),
    *(
        Case("cocoa", cocoa, settings, world)
        for world in (on(Line, rounds=EVERYBODY), yes_or_no_from_everybody)
        for settings in (
            {},
            {"aggregation": "averaging"},
            {"regularization": 0.2, "local_passes": 3},
        )
    ),
    Case("cocoa", cocoa, {}, on(Line)),
    Case("cocoa", cocoa, {}, yes_or_no),
    Case("scaffold", scaffold),
    Case("scaffold", scaffold, {"server_lr": 0.6}),
    Case("scaffold", scaffold, {"weights": "examples"}),
    Case("scaffold", scaffold, world=FULL_BATCH),
    Case("feddc", feddc),
    Case("feddc", feddc, {"alpha": 0.5}),
    Case("feddc", feddc, {"alpha": 0.0, "weights": "uniform"}),
    Case("feddc", feddc, {"alpha": 0.5}, NORMED),
    Case("feddc", feddc, world=FULL_BATCH),
    Case("moon", moon),
    Case("moon", moon, world=on(TwoLayers)),
    Case("moon", moon, {"mu": 5.0, "temperature": 0.2}, on(TwoLayers)),
    Case("moon", moon, {"mu": 5.0, "weights": "uniform"}, on(TwoLayers, batch=None, epochs=3)),
    Case("moon", moon, {"mu": 5.0}, on(TwoLayers, momentum=0.5)),
    Case("moon", moon, {"mu": 0.0}, on(TwoLayers)),
    Case("fednova", fednova),
    Case("fednova", fednova, world=on(Softmax, momentum=0.5)),
    Case("feddyn", feddyn),
    Case("feddyn", feddyn, {"alpha": 0.7}),
    *(Case("qfedavg", qfedavg, {"q": q, "weights": w}) for q in (0.0, 0.5, 1.0, 3.0) for w in ("uniform", "examples")),
    Case("ditto", ditto, {"lam": 0.1}),
    Case("ditto", ditto, {"lam": 1.5}),
    Case("perfedavg", perfedavg, {"alpha": 0.2}),
    Case("perfedavg", perfedavg, {"alpha": 0.2}, on(TwoLayers)),
    Case("fedrep", fedrep, world=on(TwoLayers)),
    Case("fedrep", fedrep, {"head_epochs": 3.0}, on(TwoLayers)),
    Case("fedrep", fedrep, {"head": ("body",)}, on(TwoLayers)),
    Case("fedrep", fedrep, {"head": ("body.",)}, on(TwoLayers)),
    Case("fedrep", fedrep, {"head": ("body.bias", "head")}, on(TwoLayers)),
    Case("ifca", ifca, world=two_kinds),
    Case("ifca", ifca, {"clusters": 3}, two_kinds),
    Case("peer", peer),
    *(
        Case("peer", peer, {"weights": weights, "scores": scores, **metric})
        for weights in ("score", "within_std")
        for scores in ("post", "pre")
        for metric in ({}, LOSS)
    ),
    Case("peer", peer, {"weights": "metropolis"}),
    *(
        Case("peer", peer, {"weights": weights, "topology": topology}, five_clients)
        for weights in ("uniform", "metropolis", "score")
        for topology in ("ring", "star")
    ),
    # batch normalisation's buffers
    Case("fedsgd", fedsgd, world=NORMED),
    Case("fedprox", fedprox, {"mu": 0.3}, NORMED),
    Case("fedavgm", fedavgm, {"server_lr": 0.7, "server_momentum": 0.6}, NORMED),
    Case("scaffold", scaffold, world=NORMED),
    Case("scaffold", scaffold, {"server_lr": 0.6}, NORMED),
    Case("fednova", fednova, world=NORMED),
    Case("feddyn", feddyn, world=NORMED),
    Case("ditto", ditto, {"lam": 0.3}, NORMED),
    Case("perfedavg", perfedavg, {"alpha": 0.2}, NORMED),
    Case("peer", peer, world=NORMED),
    *(Case("qfedavg", qfedavg, {"q": q, "weights": w}, NORMED) for q in (0.0, 2.0) for w in ("uniform", "examples")),
    Case("fedrep", fedrep, {"head": ("out",), "head_epochs": 2.0}, NORMED),
    Case("fedrep", fedrep, {"head": ("norm.weight", "norm.bias")}, NORMED),
    Case("ifca", ifca, world=NORMED_KINDS),
    Case("staged", staged),
    Case("staged", staged, world=NORMED),
    Case("staged", staged, {"groups": 3, "weights": "uniform"}),
]
