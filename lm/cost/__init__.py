"""Devices, FLOP counts, and the estimate behind --plan."""
