"""Comparators: who gives the other side of each comparison in iterative training."""
