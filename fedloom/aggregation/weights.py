"""How much each client counts: functions that make rows of a mixing matrix, and graphs of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError

SMALLEST_LOSS = 1e-6  # replaces a loss of exactly zero, whose inverse would be infinite
SMALLEST_SCORE = 1e-12  # replaces a score of zero: negligible beside any other, but equal weights if all are zero


def by_size(kind: str, examples: Tensor) -> Tensor:
    """Return `examples` or `uniform` weights, from the numbers of training examples."""
    return by_examples(examples) if kind == "examples" else uniform(examples)


def by_examples(examples: Tensor) -> Tensor:
    """Return weights proportional to the number of training examples (McMahan et al. 2017)."""
    return examples.to(torch.float64)


def uniform(examples: Tensor) -> Tensor:
    """Return the same weight for every client."""
    return torch.ones(len(examples), dtype=torch.float64)


def by_score(scores: Tensor, higher_is_better: bool = True) -> Tensor:
    """Return weights proportional to a score, or to the inverse of a score that should be low; equal if all are zero.

    An undefined score (NaN or infinite) has no weight beside defined ones. If no score is defined, all count the same.
    Each client can compute its own weight, so the server does not need to see the scores.

    >>> by_score(torch.tensor([0.5, 1.0]))
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    scores = scores.to(torch.float64)
    weigh = scores if higher_is_better else 1 / torch.where(scores <= 0, SMALLEST_LOSS, scores)
    return torch.where(scores.isfinite(), weigh, 0.0).clamp(min=SMALLEST_SCORE)


def within_one_std(scores: Tensor, higher_is_better: bool = True) -> Tensor:
    """Return weight 1 for scores at most one (population) standard deviation worse than the mean, and 0 for others.

    Mean and deviation are those of the defined (finite) scores. An undefined score has no weight. If no score is
    defined, all count the same.

    >>> within_one_std(torch.tensor([0.9, 0.9, 0.9, 0.1, torch.nan]))
    tensor([1., 1., 1., 0., 0.], dtype=torch.float64)
    """
    scores = scores.to(torch.float64)
    defined = scores.isfinite()
    if not bool(defined.any()):
        return torch.ones_like(scores)
    mean, spread = scores[defined].mean(), scores[defined].std(correction=0)
    # equal scores have a spread of zero, and rounding must not exclude all of them
    slack = 1e-12 * (1 + mean.abs())
    chosen = scores >= mean - spread - slack if higher_is_better else scores <= mean + spread + slack
    return (chosen & defined).to(torch.float64)


def metropolis(graph: Tensor) -> Tensor:
    """Return a doubly stochastic matrix: 1 / (1 + the larger degree) on a graph's edges, the rest on the diagonal."""
    edges = graph.bool() & ~torch.eye(len(graph), dtype=torch.bool)
    degree = edges.sum(1)
    matrix = edges / (1.0 + torch.maximum(degree[:, None], degree[None, :])).to(torch.float64)
    return matrix + torch.diag(1 - matrix.sum(1))


def topology(name: str, clients: int, key: int, degree: int = 2, probability: float = 0.5) -> Tensor:
    """Return which clients are neighbours, as a symmetric boolean matrix. Every client is its own neighbour.

    >>> topology("ring", 4, key=0).int().tolist()
    [[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]]
    """
    number = torch.arange(clients)
    graph = torch.eye(clients, dtype=torch.bool)
    if name == "full":
        return torch.ones_like(graph)
    if name == "star":
        graph[0] = True
    elif name == "ring":
        graph[number, (number + 1) % clients] = True
    elif name == "torus":
        rows = max(side for side in range(1, int(clients**0.5) + 1) if clients % side == 0)
        columns = clients // rows
        right = number // columns * columns + (number % columns + 1) % columns
        graph[number, right] = True
        graph[number, (number + columns) % clients] = True
    elif name == "erdos_renyi":
        drawn = torch.from_numpy(keys.hashes(key, clients * clients)).reshape(clients, clients) < probability * 2**32
        graph |= torch.triu(drawn, diagonal=1)
    else:
        graph |= _regular(clients, degree, key)
    return graph | graph.t()


def _regular(clients: int, degree: int, key: int) -> Tensor:
    """Draw a random graph in which every client has `degree` neighbours: pair stubs until no edge is doubled."""
    if degree >= clients or clients * degree % 2:
        raise InputError(
            f"There is no graph in which {clients} clients have {degree} neighbours each: the degree must be less than "
            "the number of clients, and one of the two even."
        )
    stubs = torch.arange(clients).repeat_interleave(degree)
    for attempt in range(200):
        order = torch.from_numpy(keys.permutation(keys.key(key, "regular", attempt), len(stubs)))
        pairs = stubs[order].reshape(-1, 2)
        graph = torch.zeros((clients, clients), dtype=torch.bool)
        graph[pairs[:, 0], pairs[:, 1]] = True
        graph = graph | graph.t()
        if not graph.diagonal().any() and bool((graph.sum(1) == degree).all()):
            return graph
    # dense graphs are rarely drawn without a double edge: use a ring with longer and longer chords
    graph = torch.zeros((clients, clients), dtype=torch.bool)
    order = torch.from_numpy(keys.permutation(key, clients))
    number = torch.arange(clients)
    for reach in range(1, degree // 2 + 1):
        graph[order[number], order[(number + reach) % clients]] = True
    if degree % 2:
        graph[order[number], order[(number + clients // 2) % clients]] = True
    return graph | graph.t()
