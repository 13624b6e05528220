"""Memory, communication and time of a run before it runs: the recipe itself, where tensors have
sizes but no bytes.
"""
