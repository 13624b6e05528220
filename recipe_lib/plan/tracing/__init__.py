"""Run a recipe on fake tensors, and note its allocations and operators as a trace."""
