"""How often the report's intervals hold together, over 10,000 made-up experiments of three algorithms.

    python benchmarks/statistics_coverage.py

Prints, for normal and skewed results, the share of experiments in which all three paired intervals contain the true
difference (which is zero: so 1 − coverage is also the share with at least one false "clear difference"). Then,
of 100,000 clients for which two models are equally good, how many are wrongly told apart by their few test examples, if
the models err independently and if they err as oppositely as they can; and by the mean of absolute errors that are
independent.
"""

import numpy as np
from scipy.stats import t

from fedloom.results.client_chance import far
from fedloom.results.statistics import LEVEL, differences

DRAWS = {
    "normal": lambda draws, shape: draws.normal(size=shape),
    "log-normal (skewed alike)": lambda draws, shape: draws.lognormal(size=shape),
    "log-normal, first algorithm only": lambda draws, shape: np.concatenate(
        [draws.lognormal(size=(shape[0], 1, shape[2])) - np.exp(0.5), draws.normal(size=(shape[0], 2, shape[2]))], 1
    ),
}

for kind, draw in DRAWS.items():
    for seeds in (3, 6, 10):
        values = draw(np.random.default_rng(seeds), (10_000, 3, seeds))
        gaps = np.stack([values[:, one] - values[:, other] for one, other in ((0, 1), (0, 2), (1, 2))], 1)
        reach = t.ppf(1 - (1 - LEVEL) / 6, seeds - 1) * gaps.std(2, ddof=1) / np.sqrt(seeds)
        for one in range(20):  # what is computed here for many experiments at once is what a report computes for one
            found = differences({str(label): dict(enumerate(run)) for label, run in enumerate(values[one])})
            assert np.allclose([pair.spread.high for pair in found], gaps[one].mean(1) + reach[one])
        print(f"{kind}, {seeds} seeds: {(abs(gaps.mean(2)) <= reach).all(1).mean():.1%}")


def wrongly_told_apart(one: np.ndarray, other: np.ndarray, tested: int, clients: int) -> float:
    """The rule of `against_alone.py`, for many clients at once and without the spread over seeds."""
    right = (one + other) / 2
    return float((abs(one - other) > far(clients) * np.sqrt(2 * right * (1 - right) / tested)).mean())


CLIENTS = 5
draws = np.random.default_rng(0)
for tested in (10, 20, 40, 100, 400):
    for share in (0.5, 0.7, 0.9, 0.97):
        apart = draws.binomial(tested, share, (2, 100_000)) / tested
        parts = [max(2 * share - 1, 0), min(share, 1 - share), min(share, 1 - share), max(1 - 2 * share, 0)]
        both, first, second, _ = draws.multinomial(tested, parts, 100_000).T / tested
        rates = [wrongly_told_apart(*pair, tested, CLIENTS) for pair in (apart, (both + first, both + second))]
        print(f"{tested} test examples, right on {share:.0%}: {rates[0]:.2%} independent, {rates[1]:.2%} opposed")

ERRORS = {
    "normal": lambda shape: draws.normal(size=shape),
    "Laplace": lambda shape: draws.laplace(size=shape),
    "t with 3 degrees of freedom": lambda shape: draws.standard_t(3, size=shape),
    "log-normal": lambda shape: draws.lognormal(size=shape) - np.exp(0.5),
}
for tested in (10, 40, 400):
    for kind, draw in ERRORS.items():
        one, other = abs(draw((2, 20_000, tested))).mean(2)
        wrong = abs(one - other) > far(CLIENTS) * np.sqrt((one**2 + other**2) / tested)
        print(f"{tested} test examples, mean of {kind} absolute errors: {wrong.mean():.2%}")
