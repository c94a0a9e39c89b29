"""Launchers, which get the training command onto clusters and clouds: docs/scaling.md."""
