"""Simulated sweeps with a known truth, which justify the design of sweeps and its statistics."""
