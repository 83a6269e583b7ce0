"""The parts of ``benchmarks/speed.py``."""
