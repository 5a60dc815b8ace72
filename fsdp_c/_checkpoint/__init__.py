"""Shards to files and to whole tensors, and back."""
