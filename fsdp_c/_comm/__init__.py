"""Ranks that talk: how they meet, transports, collectives of our own and those of devices."""
