"""The time that a traced program takes: kernels, links, streams and pipelines."""
