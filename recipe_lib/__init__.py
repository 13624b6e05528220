"""The library that the recipes stand on: configs, models, data, parallelism, memory, checkpoints, training."""

__version__ = "0.1.0"
