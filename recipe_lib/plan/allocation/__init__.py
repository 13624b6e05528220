"""A trace replayed through a model of CUDA's caching allocator."""
