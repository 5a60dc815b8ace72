"""How much memory a model takes, and moving it away for a while."""
