"""Replay a trace through a model of CUDA's caching allocator, with scratch that no tensor shows."""
