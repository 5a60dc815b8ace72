"""In the place of torch's fully_shard: install(), and `python -m fsdp_c`."""
