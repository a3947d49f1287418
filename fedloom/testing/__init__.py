"""Checks that you can run on your own code: `check_algorithm` on an algorithm, `check_task` on a model and its loss."""

from fedloom.testing.algorithms import check_algorithm
from fedloom.testing.tasks import TaskReport, check_task

__all__ = ["TaskReport", "check_algorithm", "check_task"]
