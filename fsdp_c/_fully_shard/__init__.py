"""fully_shard: parameters, groups and states of FSDP, and how the engine gets them."""
