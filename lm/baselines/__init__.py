"""Baselines that are counted, not trained: what a model must beat."""
