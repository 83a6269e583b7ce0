"""The learners."""
