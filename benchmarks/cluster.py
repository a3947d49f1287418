"""What Ray costs a round, what a second node gains, and what 100 nodes would do.

python benchmarks/cluster.py --part overhead nodes constants plan

`overhead` compares backend = "ray" with backend = "vector", both with two workers on this machine, in turns. `nodes`
lets clients sleep instead of train, so that one machine can act as two. `constants` measures what moving and adding
up costs; `plan` multiplies them for a cluster that nobody started. Needs fedloom[ray]; no data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import describe_machine, machine, short, summary, table, write

import fedloom as fl
from fedloom.aggregation.means import PairwiseSum, partial_sums
from fedloom.backends import ray as on_ray
from fedloom.backends.ray import FAN_IN, Ray, spread
from fedloom.backends.ray_cluster import Cluster, Node
from fedloom.backends.vector import Vector, Workers
from fedloom.data.split import Split
from fedloom.training.probe import probe

NOTHING = fl.Evaluation(splits=(), server=())
MEGABYTE = 1_000_000
MODELS = {"2NN": 796_840, "CNN": 6_653_480, "25 M parameters": 100_000_000}  # bytes


class Sleep(fl.FedAvg):
    """A client that takes time but no processor."""

    seconds: float = 0.1

    def client(self, task: Any, shared: Any, own: Any, data: Any) -> Any:
        time.sleep(self.seconds * len(data))
        return super().client(task, shared, own, data)


def pictures(clients: int, examples: int) -> fl.Federation:
    """Noise in the shape of MNIST; only the time matters here."""
    draws = np.random.default_rng(0)
    x = torch.from_numpy(draws.normal(size=(clients * examples, 28, 28)).astype(np.float32))
    y = torch.from_numpy(draws.integers(0, 10, clients * examples))
    offsets = np.arange(clients + 1) * examples
    split = Split(train=1.0, validation=0.0, test=0.0)
    return fl.Federation(x, y, offsets, split=split, classes=tuple("0123456789"))


def rounds(federation: fl.Federation, task: fl.Task, algorithm: fl.Algorithm, backend: Any, cohort: int) -> Any:
    """Rounds without end."""
    sampling = fl.Sampling(count=cohort)
    return fl.fit(federation, task, algorithm, 10**9, sampling=sampling, evaluation=NOTHING, backend=backend)


def seconds_of(actions: dict[str, Callable[[], Any]], times: int, warm_up: int = 2) -> dict[str, dict[str, float]]:
    """Measure the seconds of some actions, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(warm_up + times):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if number >= warm_up:
                found[name].append(time.perf_counter() - began)
    return {name: summary(values) for name, values in found.items()}


def overhead(options: argparse.Namespace) -> tuple[str, str, Any]:
    """The same rounds by both backends, two workers each."""
    rows, facts = [], {}
    task = fl.Task("mnist_2nn")
    cluster, workers = Cluster("local", workers=2), Workers(2)
    works = {"nothing to learn: 10 clients with one example": (10, 1), "2NN: 10 clients of 600, batch 10": (100, 600)}
    for name, (clients, examples) in works.items():
        federation = pictures(clients, examples)
        setup = probe(federation, task).setup(group=1)
        backends = {
            "vector": Vector(federation, task, setup, workers),
            "ray": Ray(federation, task, setup, cluster),
        }
        algorithm = fl.FedAvg(lr=0.1, batch_size=10)
        running = {kind: rounds(federation, task, algorithm, backend, 10) for kind, backend in backends.items()}
        found = seconds_of({kind: going.__next__ for kind, going in running.items()}, options.rounds)
        facts[name] = found
        more = found["ray"]["median"] - found["vector"]["median"]
        rows.append([name, *(spread_of(found[kind]) for kind in ("vector", "ray")), f"{more * 1000:.0f} ms"])
    cluster.close()
    workers.close()
    return "Overhead on one machine", table(["work", "vector: s a round", "ray: s a round", "Ray costs"], rows), facts


def spread_of(found: dict[str, float]) -> str:
    return f"{short(found['median'])} ({short(found['q1'])} – {short(found['q3'])})"


@contextmanager
def machines(*processors: int) -> Iterator[Cluster]:
    """Start Ray nodes on this machine, each with this number of processors."""
    from ray.cluster_utils import Cluster as Simulated

    simulated = Simulated(initialize_head=True, head_node_args={"num_cpus": processors[0], "include_dashboard": False})
    for count in processors[1:]:
        simulated.add_node(num_cpus=count, wait=True)
    cluster = Cluster(simulated.address, nodes=len(processors))
    try:
        yield cluster
    finally:
        cluster.close()
        simulated.shutdown()


def nodes(options: argparse.Namespace) -> tuple[str, str, Any]:
    """Run 32 clients that sleep 0.1 s each: two workers sleep 1.6 s on one node, or 0.8 s on each of two."""
    clients, sleep, facts = 32, 0.1, {}
    federation, task = pictures(clients, 1), fl.Task("mnist_2nn")
    for count in (1, 2):
        with machines(*[2] * count) as cluster:
            backend = Ray(federation, task, probe(federation, task).setup(group=1), cluster)
            going = rounds(federation, task, Sleep(seconds=sleep), backend, clients)
            facts[count] = seconds_of({"ray": going.__next__}, options.rounds)["ray"]
    one = facts[1]["median"]
    rows = [
        [str(count), f"{clients * sleep / 2 / count:.2f}", spread_of(found), f"{one / found['median']:.2f} ×"]
        for count, found in facts.items()
    ]
    return "One node and two, 32 sleeping clients", table(["nodes", "sleep alone", "s a round", "gain"], rows), facts


def nothing(message: Any) -> int:
    return 0


def make(size: int) -> list[Any]:
    return on_ray.pack({"w": torch.ones(size // 4)})


def constants(options: argparse.Namespace) -> tuple[str, str, Any]:
    """Measure what a task, moving a byte and adding a byte cost."""
    size, tasks, facts = 64 * MEGABYTE, 300, {}
    with machines(1, 1) as cluster:
        ray, members = cluster.ray, cluster.nodes()
        here = ray.get_runtime_context().get_node_id()
        (there,) = (node for node in members if node.id != here)
        message = make(size)

        def many() -> None:
            ray.get([cluster.on(members[number % 2], nothing)(None) for number in range(tasks)])

        found = seconds_of({"tasks": many, "put": lambda: ray.put(message)}, 5)
        facts["task"] = found["tasks"]["median"] / tasks
        facts["put"] = found["put"]["median"] / size
        pulls, adds = [], []
        for _ in range(7):
            ref = cluster.on(there, make)(size)
            ray.wait([ref], fetch_local=False)
            began = time.perf_counter()
            answer = ray.get(ref)
            pulls.append(time.perf_counter() - began)
            began = time.perf_counter()
            total = PairwiseSum()
            total.add(on_ray.unpack(answer), 0)
            total.add({"w": torch.ones(size // 4)}, 1)
            adds.append(time.perf_counter() - began)
        facts["pull"], facts["add"] = statistics.median(pulls) / size, statistics.median(adds) / size
    names = {"put": "into the object store", "pull": "to another node on this machine", "add": "unpacked and added"}
    rows = [["a task, submitted and answered", f"{facts['task'] * 1000:.2f} ms"]]
    rows += [[f"a megabyte {text}", f"{facts[key] * MEGABYTE * 1000:.2f} ms"] for key, text in names.items()]
    return "Constants", table(["what", "cost"], rows), facts


def sums(begin: int, end: int) -> int:
    """Count the partial sums of the clients of a range."""
    return len(partial_sums({"": torch.ones(end - begin)}, torch.ones(end - begin), begin))


@dataclass(frozen=True)
class Driver:
    """The driver's part of a round: what it sends, and what it gets if nodes send to it or add up for each other."""

    down: int  # bytes
    star: int
    star_seconds: float
    tree: int
    tree_seconds: float


def driver(nodes: int, clients: int, model: int, options: argparse.Namespace, measured: dict[str, float]) -> Driver:
    """Calculate the seconds of tasks, weights and sums, as the backend would send them, from their measured costs."""
    ranges = [part for part in spread([1] * clients, [Node("", "", options.workers, 0, 0)] * nodes) if part]
    holders = [(part[0][0], part[-1][1]) for part in ranges]
    tasks = sum(len(part) + (len(part) > 1) for part in ranges)

    def receive(senders: list[tuple[int, int]]) -> tuple[int, float]:
        size = sum(sums(begin, end) for begin, end in senders) * model
        moved = max(1 / options.network, measured["pull"])  # whichever is slower: the link, or Ray on it
        return size, size * (moved + measured["add"])

    star, star_seconds = receive(holders)
    waiting, reducers, senders = 0.0, 0, holders
    while len(senders) > FAN_IN:
        groups = [senders[i : i + FAN_IN] for i in range(0, len(senders), FAN_IN)]
        waiting += max(receive(group)[1] for group in groups)
        reducers += len(groups)
        senders = [(group[0][0], group[-1][1]) for group in groups]
    tree, tree_seconds = receive(senders)
    before = model * measured["put"] + tasks * measured["task"]
    more = waiting + reducers * measured["task"]
    return Driver(len(ranges) * model, star, before + star_seconds, tree, before + more + tree_seconds)


def plan(options: argparse.Namespace, measured: dict[str, float]) -> tuple[str, str, Any]:
    """Clusters that are calculated, not run; and how many nodes keep the driver busy for ten seconds a round."""
    rows, most, facts = [], [], []
    for name, model in MODELS.items():
        for count in options.nodes:
            found = driver(count, options.clients * count, model, options, measured)
            facts.append({"model": name, "nodes": count, **asdict(found)})
            sizes = [f"{size / 1e9:.2f} GB" for size in (found.down, found.star, found.tree)]
            times = [f"{seconds:.2f} s" for seconds in (found.star_seconds, found.tree_seconds)]
            rows.append([name, str(count), sizes[0], sizes[1], times[0], sizes[2], times[1]])
        limits = []
        for kind in ("star_seconds", "tree_seconds"):
            count = 1
            while getattr(driver(2 * count, options.clients * 2 * count, model, options, measured), kind) <= 10:
                count *= 2
            limits.append(f"{count}")
        most.append([name, *limits])
    header = ["model", "nodes", "weights to nodes", "star: to the driver", "star: s", "tree: to the driver", "tree: s"]
    tables = [table(header, rows), table(["model", "star: most nodes below 10 s", "tree"], most)]
    title = f"{options.clients} clients a node and round, {options.network / 1.25e8:.0f} Gbit/s"
    return title, "\n\n".join(tables), {"rounds": facts, "most nodes": most}


def main() -> None:
    """Measure the requested parts, one section each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=["overhead", "nodes", "constants", "plan"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 100], help="for the plan")
    parser.add_argument("--workers", type=int, default=16, help="a node, for the plan")
    parser.add_argument("--clients", type=int, default=10, help="a node and round, for the plan")
    parser.add_argument("--network", type=float, default=1.25e9, help="bytes a second of one machine, for the plan")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    parts = options.part or ["overhead", "nodes", "constants", "plan"]
    facts: dict[str, Any] = {"machine": machine()}
    sections = ["# Ray", describe_machine(facts["machine"])]
    for part in parts:
        if part == "plan":
            known = facts.get("constants") or json.loads((options.out / "cluster.json").read_text())["constants"]
            facts["constants"] = known  # kept for the next plan
            title, text, facts[part] = plan(options, known)
        else:
            title, text, facts[part] = {"overhead": overhead, "nodes": nodes, "constants": constants}[part](options)
        sections += [f"## {title}", text]
    write("cluster", "\n\n".join(sections), facts, options.out)
    print("\n\n".join(sections))


if __name__ == "__main__":
    main()
