"""A run's state in memory that outlives its processes, and back."""
