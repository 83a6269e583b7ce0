"""Agents: loading, prompts, sampling and log-probabilities."""
