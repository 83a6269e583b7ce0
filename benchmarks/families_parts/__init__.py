"""Parts of ``benchmarks/families.py``."""
