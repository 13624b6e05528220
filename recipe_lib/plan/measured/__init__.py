"""Measure this machine for the planner: the rates of its device, and runs that had a plan.

`measure_rates` measures rates, `rates_file` reads them, `receipts` keeps the runs.
"""
