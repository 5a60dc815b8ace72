"""Differences between versions of torch, and names of torch that are bound anew."""
