"""Hold what the recipes stand on: config, models, data, parallelism, memory, training."""

__version__ = "0.1.0"
