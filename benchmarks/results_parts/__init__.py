"""The parts of ``benchmarks/results.py``."""
