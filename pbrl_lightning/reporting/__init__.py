"""What a run says of itself while it works."""
