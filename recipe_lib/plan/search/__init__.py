"""Estimates of changed configs: advice, search, and the choice of a strategy."""
