"""A recipe run in the simulated world, noted as a trace."""
