"""Infer tensor-parallel plans from one forward of a model, and describe them as data."""
