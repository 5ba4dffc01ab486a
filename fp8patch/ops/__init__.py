"""Operators: what the modules call. Each has a CPU form that is the oracle of `numerics`."""
