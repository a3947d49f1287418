"""Run an experiment file: cells, worker processes, checkpoints, the database."""
