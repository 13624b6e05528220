"""Tensor parallel plans from what one forward of a model does, and proofs that they are right."""
