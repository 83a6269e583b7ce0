"""What makes a forward fast on the machine at hand."""
