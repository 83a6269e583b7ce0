"""Ready task bundles: items, one formatter per role, and a task reward."""
