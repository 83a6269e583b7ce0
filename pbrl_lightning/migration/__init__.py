"""CoMLRL's configurations as ours: one table of names, the rules that hold for them, and the conversion."""
