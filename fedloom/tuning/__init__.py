"""Before and around a run: cost estimates, benchmarks, sweeps."""
