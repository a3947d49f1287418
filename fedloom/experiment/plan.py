"""From a parsed experiment file to what `run` takes: data, task, algorithms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fedloom import user_code
from fedloom.data.build import federate
from fedloom.data.federation import Federation
from fedloom.errors import InputError, ParameterError
from fedloom.experiment.experiment_file import Experiment
from fedloom.task import Task


class Plan:
    """An experiment's data and task, loaded when they are first needed."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._dataset = lru_cache(maxsize=1)(lambda: experiment.source.load(experiment.base))
        self._federation = lru_cache(maxsize=1)(self._federate)
        self._task = lru_cache(maxsize=8)(self._make_task)

    def federation(self, seed: int) -> Federation:
        """The data for a run with this seed."""
        wanted = self.experiment.data.seed
        return self._federation(seed if wanted == "run" else wanted)

    def task(self, seed: int) -> Task:
        """The task for a run with this seed."""
        wanted = self.experiment.task.seed
        return self._task(seed if wanted == "run" else wanted)

    def _federate(self, seed: int | str) -> Federation:
        data = self.experiment.data
        try:
            return federate(
                self._dataset(),
                partition=data.partition,
                split=data.split,
                seed=int(seed),
                normalize=data.normalize,
                server=data.server,
            )
        except ParameterError as error:
            raise InputError(error.at("data.partition")) from None

    def _make_task(self, seed: int | str) -> Task:
        table, base = self.experiment.task, self.experiment.base
        init = table.init if table.init in ("torch", "glorot") else str(base / table.init)
        return Task(
            user_code.code(table.model, base) if user_code.is_code(table.model) else table.model,
            loss=user_code.code(table.loss, base) if user_code.is_code(table.loss) else table.loss,
            metrics=table.metrics,
            args=table.args,
            init=init,
            dtype=table.dtype,
            seed=int(seed),
        )

    def arguments(self) -> dict[str, Any]:
        """The arguments of `run`."""
        experiment = self.experiment
        settings = experiment.run
        return {
            "federation": self.federation,
            "task": self.task,
            "algorithms": experiment.algorithm,
            "rounds": experiment.rounds,
            "seeds": experiment.seeds,
            "cohort": experiment.cohort,
            "evaluate": experiment.evaluate,
            "name": experiment.name,
            "backend": settings.backend,
            "workers": settings.workers,
            "address": settings.address,
            "nodes": settings.nodes,
            "group": settings.group,
            "replay": settings.replay,
            "device": settings.device,
            "cells": settings.cells,
            "checkpoint_every": settings.checkpoint_every,
            "keep_models": settings.keep_models,
            "description": experiment.description(),
            "resolved": experiment.resolved(),
        }
