"""The library of the recipes: configs, models, data, parallelism, memory, checkpoints, training."""

__version__ = "0.1.0"
