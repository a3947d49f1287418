"""The odd models, by what is odd about them."""
