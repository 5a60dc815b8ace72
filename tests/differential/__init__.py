"""Random models and call sequences under torch's fully_shard and the tested one, side by side.

`generate` writes a short program per seed, `run` runs it on both sides in one process group and
compares all that a user can see after each line, `shrink` makes a failing program small and
prints it as a script. `python -m tests.differential --help` runs seeds by hand.
"""
