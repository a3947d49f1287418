"""NEAT on a federated fitness: neat-python evolves the nets' graphs, nodes evaluate them, fedloom does the rest.

A genome becomes the weights of `Graph`, a net with room for any feed-forward graph of up to `hidden` hidden units. So
nodes receive and evaluate a stacked population of ordinary weights, as they do for every search in fedloom.
"""

import io
import pickle
import random
from contextlib import contextmanager
from pathlib import Path

import neat
import torch
from sklearn.datasets import load_wine
from torch import nn

from fedloom import keys
from fedloom.algorithms.evolution.fitness import Search
from fedloom.tree import row, stack

CONFIG = Path(__file__).with_name("neat.ini")


def wine():
    """178 wines of three growers, by 13 measurements with mean 0 and standard deviation 1."""
    x, y = load_wine(return_X_y=True)
    return ((x - x.mean(0)) / x.std(0)).astype("float32"), y


class Graph(nn.Module):
    """Units connected to inputs and each other: tanh(2.5 (bias + weights · inputs)), repeated along every path.

    The last `outputs` units are the answer. A graph without loops has settled after as many passes as it has units on
    its longest path, which cannot be more than `hidden` + 1.
    """

    def __init__(self, inputs, outputs, hidden):
        super().__init__()
        self.hidden, self.outputs = hidden, outputs
        self.weight = nn.Parameter(torch.zeros(hidden + outputs, inputs + hidden + outputs))
        self.bias = nn.Parameter(torch.zeros(hidden + outputs))

    def forward(self, x):
        """One value per class, between −1 and 1."""
        units = x.new_zeros(len(x), self.hidden + self.outputs)
        for _ in range(self.hidden + 1):
            units = torch.tanh(2.5 * (torch.cat([x, units], 1) @ self.weight.t() + self.bias))  # neat-python's tanh
        return units[:, self.hidden :]


class Neat(Search):
    """Evolves graphs together with their weights, by NEAT on the clients' mean fitness."""

    reference = "Stanley and Miikkulainen, Evolving Neural Networks through Augmenting Topologies, 2002"

    def init(self, task, model):
        """The model of a net without connections, and neat-python's first population."""
        with _drawing(keys.key(task.seed, "neat")):
            population = neat.Population(_config())
        return {"model": model, "neat": _frozen(population)}

    def round(self, state, cohort):
        """One generation of neat-python, whose fitness function asks the cohort."""
        population = _thawed(state["neat"])
        found = {}

        def judge(genomes, config):
            expressed = [(genome, _weights(genome, config.genome_config, state["model"])) for _, genome in genomes]
            judged = [(genome, weights) for genome, weights in expressed if weights is not None]
            stacked = stack([weights for _, weights in judged])
            fitness = self.ask(cohort, stacked, state["model"])
            for genome, _ in expressed:
                genome.fitness = float(fitness.min())  # for those that do not fit into the net
            for (genome, _), value in zip(judged, fitness.tolist(), strict=True):
                genome.fitness = value
            best = int(fitness.argmax())
            found.update(model={**state["model"], **row(stacked, best)}, genome=judged[best][0], fitness=fitness)

        with _drawing(cohort.key("neat")):
            population.run(judge, 1)
        units, connections = found["genome"].size()
        cohort.note(fitness=float(found["fitness"].max()), mean_fitness=float(found["fitness"].mean()))
        cohort.note(
            hidden=units - cohort.task.module.outputs, connections=connections, species=len(population.species.species)
        )
        model = {name: leaf.clone() for name, leaf in found["model"].items()}
        return {"model": model, "neat": _frozen(population)}


def _weights(genome, config, model):
    """A genome as weights of `Graph`; None if it has more hidden units than fit."""
    outputs, inputs = config.output_keys, config.input_keys
    hidden = sorted(key for key in genome.nodes if key not in outputs)
    units = len(model["bias"])
    room = units - len(outputs)
    if len(hidden) > room:
        return None
    place = {key: number for number, key in enumerate(hidden)} | {key: room + n for n, key in enumerate(outputs)}
    heard = {key: number for number, key in enumerate(inputs)} | {key: len(inputs) + n for key, n in place.items()}
    weight, bias = torch.zeros_like(model["weight"]), torch.zeros_like(model["bias"])
    for key, node in genome.nodes.items():
        bias[place[key]] = node.bias
    for (source, target), connection in genome.connections.items():
        if connection.enabled and source in heard and target in place:
            weight[place[target], heard[source]] = connection.weight * genome.nodes[target].response
    return {"weight": weight, "bias": bias}


def _config():
    return neat.Config(
        neat.DefaultGenome, neat.DefaultReproduction, neat.DefaultSpeciesSet, neat.DefaultStagnation, str(CONFIG)
    )


@contextmanager
def _drawing(key):
    """Lend a seeded generator to neat-python, which draws from Python's global one."""
    before = random.getstate()
    random.seed(key)
    try:
        yield
    finally:
        random.setstate(before)


def _frozen(population):
    """neat-python's population as bytes in a tensor, so that it is checkpointed with the run.

    It is a pickle, as in neat-python's own checkpoints: continue only runs that are your own.
    """
    return {"population": torch.frombuffer(bytearray(pickle.dumps(population)), dtype=torch.uint8)}


def _thawed(frozen):
    return pickle.load(io.BytesIO(frozen["population"].numpy().tobytes()))
