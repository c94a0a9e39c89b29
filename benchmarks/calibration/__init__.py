"""Simulations of sweeps with a known truth."""
