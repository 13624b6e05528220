"""Measurements of this machine for the planner: rates of its device, and runs that had a plan.

`measure_rates` measures rates, `rates_file` reads and writes them, `receipts` has the runs.
"""
