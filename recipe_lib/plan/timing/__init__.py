"""Compute the time that a traced run takes: of kernels, on links and streams."""
