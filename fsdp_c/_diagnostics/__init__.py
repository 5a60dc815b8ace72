"""What runs a model, and what it costs: for people."""
