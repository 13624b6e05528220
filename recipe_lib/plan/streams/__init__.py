"""Find faults that only a GPU would show, on the simulated device.

They are races between streams, waits of the host, and collectives that ranks do not call alike.
"""
