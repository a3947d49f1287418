"""The table of odd models: every kind that trained wrongly once, or might."""

from tests.odd.nets import draws, gradients, hidden, in_place, layers, shapes, state, values
from tests.odd.table import MODELS, Odd

__all__ = ["MODELS", "Odd", "draws", "gradients", "hidden", "in_place", "layers", "shapes", "state", "values"]
