"""The time that a traced program takes: kernels, links and streams."""
