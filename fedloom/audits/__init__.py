"""Attacks on your own experiment: how much of its privacy and of its robustness they take away."""
