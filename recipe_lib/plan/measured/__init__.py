"""Measurements of this machine: rates of its device, and runs that had a plan."""
