"""Compute clients on a Ray cluster. Ray moves data, schedules tasks and retries them; fedloom computes and adds up.

Every node's object store holds the examples once, and all of its processes map them. Once a round, it also gets what
all clients need (algorithm, shared weights). A range of clients is a task; the sums of a node's ranges
are added up on that node, so that it sends one message with the sums of the fewest whole subtrees of the pairwise sum
(`means.PairwiseSum`). Tasks depend only on their arguments, so Ray may repeat them anywhere.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from fedloom import machine, tree
from fedloom.backends import worker_messages
from fedloom.backends.protocol import Backend
from fedloom.backends.ray_cluster import Cluster, Node
from fedloom.backends.shared_memory import for_workers
from fedloom.backends.vector import shares, without_common
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError, TrainingError, WorkerTraceback
from fedloom.federation.work import ClientWork, Place, Work
from fedloom.task import Task
from fedloom.training.clients import Setup

FAN_IN = 8  # messages that one receiver adds up: with more nodes than this, nodes add up for each other
PROCESS_BYTES = 300_000_000  # memory of a worker without a model: Python, torch, Ray
MUST_AGREE = ("fedloom", "torch", "numpy")  # other versions may compute other bits

Range = tuple[int, int]


class Ray(Backend):
    """Spreads work over a cluster. The results do not depend on the number of nodes, or on which of them die."""

    def __init__(self, federation: Federation, task: Task, setup: Setup, cluster: Cluster) -> None:
        if setup.device != "cpu":
            raise InputError(f'[run] backend = "ray" computes on processors. Got device = "{setup.device}".')
        self.place = Place(federation, task, setup)
        self.setup, self.cluster = setup, cluster
        data = sum(part.nbytes for part in (federation.x, federation.y, *chain(*federation.server.values())))
        nodes = cluster.nodes()
        for node in nodes:
            check_memory(node, data, tree.size(task.whole(task.initial())), setup.group)
        ours = machine.facts()
        self._settled = cluster.ray.put((ours, sys.path, pack((task, setup)), pack(for_workers(federation))))
        arriving = {cluster.on(node, arrive)([self._settled]): node for node in nodes for _ in range(node.workers)}
        kinds = self._collect({ref: node.name for ref, node in arriving.items()}, "loading data and model")
        for name in sorted({node.name for ref, node in arriving.items() if kinds[ref] != ours["cpu_capability"]}):
            cluster.tell(f"{name} has another kind of processor: bits may depend on which node computes a client.")

    def run(self, work: Work) -> Any:
        """Give every node its range of clients, add up on the nodes, merge what comes back."""
        ray, nodes = self.cluster.ray, self._alive()
        common = ray.put(pack({name: getattr(work, name) for name in work.common}))
        given = ([self._settled], [common])  # inside lists, a process fetches them only if it does not have them yet
        adds = isinstance(work, ClientWork) and work.keep == "sum"
        empty = pack(without_common(work, 0, 0))
        answers: list[tuple[Node, Any, str]] = []
        for node, ranges in zip(nodes, spread(work.costs(self.place), nodes, self.setup.group > 1), strict=True):
            parts = [self.cluster.on(node, perform)(*given, pack(without_common(work, *part))) for part in ranges]
            if adds and len(parts) > 1:
                parts = [self.cluster.on(node, merge)(empty, *parts)]
                ranges = [(ranges[0][0], ranges[-1][1])]
            answers += [
                (node, part, f"{node.name}, clients {begin + 1} to {end}")
                for part, (begin, end) in zip(parts, ranges, strict=True)
            ]
        while adds and len(answers) > FAN_IN:
            answers = [self._add_up(answers[i : i + FAN_IN], empty) for i in range(0, len(answers), FAN_IN)]
        what = f"round {work.round}, {work.method}" if isinstance(work, ClientWork) else "evaluation"
        found = self._collect({ref: who for _, ref, who in answers}, what)
        return work.merge(unpack(found[ref]) for _, ref, _ in answers)

    def _add_up(self, answers: list[tuple[Node, Any, str]], empty: Any) -> tuple[Node, Any, str]:
        """Add up the answers of some nodes on the first of them."""
        node = answers[0][0]
        return node, self.cluster.on(node, merge)(empty, *(ref for _, ref, _ in answers)), f"{node.name}, adding up"

    def _alive(self) -> list[Node]:
        nodes = self.cluster.nodes()
        if not nodes:
            raise TrainingError("No node of the Ray cluster has a processor for tasks any more.")
        return nodes

    def _collect(self, awaited: dict[Any, str], what: str) -> dict[Any, Any]:
        """Collect answers as they arrive. After a long wait, report what is pending."""
        ray = self.cluster.ray
        pending, found, began = list(awaited), {}, time.monotonic()
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=self.cluster.patience)
                for ref in done:
                    found[ref] = self._get(ref, what)
                if not done:
                    self._say_what_is_awaited([awaited[ref] for ref in pending], what, time.monotonic() - began)
        except BaseException:
            for ref in pending:
                ray.cancel(ref)
            raise
        return found

    def _get(self, ref: Any, what: str) -> Any:
        from ray.exceptions import RayError, RayTaskError, UnserializableException

        try:
            return self.cluster.ray.get(ref)
        except UnserializableException as error:  # an exception class of the user; its text has the traceback
            raise TrainingError(f"A worker process failed: {error}") from None
        except RayError as error:
            cause: BaseException = error
            while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
                cause = cause.cause
            if isinstance(cause, FedloomError):
                raise cause from WorkerTraceback(str(error))
            if isinstance(error, RayTaskError) and not isinstance(cause, RayError):
                raise TrainingError(f"A worker process failed: {type(cause).__name__}: {cause}") from WorkerTraceback(
                    str(error)
                )
            raise TrainingError(
                f"{what[0].upper()}{what[1:]}: Ray gave up after {self.cluster.retries} retries (a worker that dies "
                "again and again often has too little memory; fewer workers need less). "
                f"{type(cause).__name__}: {cause}"
            ) from None

    def _say_what_is_awaited(self, who: Sequence[str], what: str, seconds: float) -> None:
        nodes = self._alive()
        free = self.cluster.ray.available_resources().get("CPU", 0)
        total = sum(node.workers for node in nodes)
        self.cluster.tell(
            f"{what}: waited {seconds:.0f} s for {'; '.join(who[:3])}{' …' if len(who) > 3 else ''}. "
            f"Nodes in the cluster: {len(nodes)}, with {total} workers in all; free processors: {free:g}."
        )

    def close(self) -> None:
        """Release the examples: they leave the object store when nothing refers to them."""
        self._settled = None


def check_memory(node: Node, data: int, model: int, group: int) -> None:
    """Raise if a node has too little memory for a run, before anything is sent to it."""
    workers, gb = node.workers, 1e9
    stored = data + model * (2 + 4 * workers)
    if stored > node.store_bytes:
        raise InputError(
            f"The object store of node {node.name} is too small: {data / gb:.2f} GB of examples + "
            f"(2 + 4 × {workers} workers) × {model / gb:.3f} GB of weights and sums = {stored / gb:.2f} GB, "
            f"and it has {node.store_bytes / gb:.2f} GB. Start its Ray with a larger --object-store-memory."
        )
    used = workers * (PROCESS_BYTES + model * (6 * group + 4))
    if used > node.memory_bytes:
        raise InputError(
            f"Node {node.name} has too little memory: {workers} workers × ({PROCESS_BYTES / gb:.1f} GB + "
            f"{6 * group + 4} × {model / gb:.3f} GB of weights) = {used / gb:.2f} GB, and Ray may use "
            f"{node.memory_bytes / gb:.2f} GB. A smaller run.workers or run.group needs less."
        )


def spread(costs: Sequence[int], nodes: Sequence[Node], once: bool = False) -> list[list[Range]]:
    """Return every node's ranges of clients, with about equal work for each worker.

    The first client of each node is rounded to whole subtrees of the pairwise sum, by at most a sixteenth of a node's
    share, so that nodes send fewer sums.
    """
    total, slots = list(accumulate(costs)), list(accumulate(node.workers for node in nodes))
    block = 1
    while 16 * block * len(nodes) <= len(costs):
        block *= 2
    ends = [np.searchsorted(total, total[-1] * count // slots[-1]) + 1 if total else 0 for count in slots[:-1]]
    ends = [min((int(end) + block // 2) // block * block, len(costs)) for end in ends]
    found = []
    for node, (begin, end) in zip(nodes, pairwise([0, *ends, len(costs)]), strict=True):
        borders = shares(costs[begin:end], node.workers, once)
        found.append([(begin + first, begin + last) for first, last in pairwise(borders)])
    return found


# --- what crosses the cluster, and what runs there

_kept: dict[str, tuple[str, Any]] = {}  # what this process has fetched and unpacked, by the object's name


def pack(payload: Any, by_value: bool = True) -> list[Any]:
    """Pack anything that can be pickled. Ray moves the bytes of its tensors without reading them."""
    head, *tensors = worker_messages.pack(payload, by_value)
    return [head, *(np.frombuffer(part, np.uint8) for part in tensors)]


def unpack(message: list[Any]) -> Any:
    """Unpack a message into new memory: the object store's is read-only."""
    return worker_messages.unpack([message[0], *(bytearray(part) for part in message[1:])])


def arrive(settled: list[Any]) -> str:
    """Load torch, data and model. Return the kind of processor."""
    _once("place", settled[0], _settle)
    return str(machine.facts()["cpu_capability"])


def perform(settled: list[Any], common: list[Any], part: list[Any]) -> list[Any]:
    """Compute a range of clients."""
    import torch

    place = _once("place", settled[0], _settle)
    shared = _once("common", common[0], unpack)
    machine.prepare_process()
    torch.set_grad_enabled(True)
    return pack(replace(unpack(part), **shared).perform(place), by_value=False)


def merge(work: list[Any], *answers: list[Any]) -> list[Any]:
    """Merge the answers of neighbouring ranges."""
    machine.prepare_process()
    return pack(unpack(work).merge(unpack(answer) for answer in answers), by_value=False)


def _once(what: str, ref: Any, make: Callable[[Any], Any]) -> Any:
    import ray

    name = ref.hex()
    if what not in _kept or _kept[what][0] != name:
        _kept.pop(what, None)  # before the new one takes memory
        _kept[what] = (name, make(ray.get(ref)))
    return _kept[what][1]


def _settle(message: tuple[dict[str, Any], list[str], list[Any], list[Any]]) -> Place:
    theirs, path, small, examples = message
    here = machine.facts()
    for name in MUST_AGREE:
        if here[name] != theirs[name]:
            raise InputError(
                f"Node {socket.gethostname()} has {name} {here[name]}, and the process that runs the experiment has "
                f"{theirs[name]}: install the same version on all nodes."
            )
    os.environ["MKL_CBWR"] = theirs["mkl_cbwr"]  # no matrix was multiplied yet
    machine.prepare_process()
    sys.path += [folder for folder in path if folder not in sys.path]
    task, setup = unpack(small)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the object store's memory is read-only, and nothing writes to it
        return Place(worker_messages.unpack(examples), task, setup)
