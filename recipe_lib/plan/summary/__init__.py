"""Sums of simulated ranks' traces: memory, verdict, time, communication."""
