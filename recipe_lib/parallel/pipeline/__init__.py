"""Divide a model's layers among ranks, and run micro-batches through them: pipeline parallelism.

`balance` divides the layers, `schedules` and `simulation` order what each rank does, `driver` runs
a step in that order.
"""
