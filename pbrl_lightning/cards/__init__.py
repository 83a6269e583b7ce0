"""Model cards of what a run exports."""
