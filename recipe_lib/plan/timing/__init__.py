"""How long a traced program takes: kernels, links, streams and pipelines."""
