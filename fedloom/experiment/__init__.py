"""Experiments: the file, the run, its store and what people see of it."""
