"""The campaign: random programs, kills, failing calls, flipped bits and limits, for hours."""
