"""Pipeline parallel: layers divided among ranks, micro-batches going through them in the order of a
schedule.
"""
