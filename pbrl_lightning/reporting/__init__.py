"""What is said of a run while it works, and the comparison of runs."""
