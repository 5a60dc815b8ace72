"""One test per behaviour of FSDP2, named after the behaviour's id; see README.md."""
