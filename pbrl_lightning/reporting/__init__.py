"""What is shown of runs: their comparison."""
