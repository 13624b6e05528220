"""Optimizers, where their states lie, when they step, clipping and the learning rate."""
