"""Selective averaging."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedloom.algorithm import Cohort, Groups, mean, within_one_std
from fedloom.algorithms.evaluation_weighted import EvaluationWeighted, higher_is_better


class Selective(EvaluationWeighted):
    """Averages only clients with a good validation score.

    w ← (1/m) Σ w_k over the m clients whose score by `metric` is at most one standard deviation worse than the mean of
    the scores. A client with an undefined score, such as the AUROC of a single class, is left out. If no score is
    defined, all clients count. The server sees each client's weights and score.
    """

    takes_stale: ClassVar[bool] = False

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        answers = cohort.map(self.client, state)
        chosen = within_one_std(answers.public["score"], higher_is_better(self.metric, cohort.task))
        if self.rule is None:
            return {"model": mean(answers["model"], chosen)}
        # a rule judges all clients: those that are left out have no weight, but the rule may need their number
        answers = replace(answers, weights={"model": chosen})
        return {"model": cohort.combine(answers, state, self.rule, judge_all=True)["model"]}
