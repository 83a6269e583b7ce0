"""Models that read a joint response and give a number: rewards and values."""
