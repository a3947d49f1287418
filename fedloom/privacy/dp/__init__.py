"""Differential privacy: clipping, noise, what it costs, and a ledger of what was spent."""
