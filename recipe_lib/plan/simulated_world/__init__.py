"""Simulate a device, ranks and data whose tensors have sizes and no bytes."""
