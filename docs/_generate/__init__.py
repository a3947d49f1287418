"""Generates the reference pages of the documentation site from the code itself, so that they cannot go stale."""
