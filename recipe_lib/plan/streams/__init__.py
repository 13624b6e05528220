"""Faults that only a GPU would show, found on the simulated device.

They are races between streams, waits of the host, and collectives that do not meet.
"""
