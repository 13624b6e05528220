"""What only a GPU would show, found on the simulated device: races between streams, waits of the
host, collectives that do not meet.
"""
