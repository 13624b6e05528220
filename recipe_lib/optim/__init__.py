"""Build and step optimizers, place their states, clip gradients, set the learning rate."""
