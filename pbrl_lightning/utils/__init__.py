"""Small helpers that know nothing of agents, preferences or Lightning."""
