"""What steps and clips sharded parameters, and gathers gradients to an owner."""
