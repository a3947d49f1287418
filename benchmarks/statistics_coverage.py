"""How often the report's intervals hold together, over 10,000 made-up experiments of three algorithms.

    python benchmarks/statistics_coverage.py

Prints, for normal and skewed results, the share of experiments in which all three paired intervals contain the true
difference (which is zero: so 1 − coverage is also the share with at least one false "clear difference").
"""

import numpy as np
from scipy.stats import t

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
