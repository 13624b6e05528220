"""Estimate runs with changed configs: advice, search, and the choice between FSDP and DDP."""
