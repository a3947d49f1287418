"""Published numbers, and how each is reproduced."""
