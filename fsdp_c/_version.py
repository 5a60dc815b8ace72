"""fsdp_c's version: the build reads it here too, and gives wheels a suffix for their torch."""

__version__ = "0.1.0"
