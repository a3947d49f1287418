"""How answers of many clients become one: means, weights, robust rules."""
