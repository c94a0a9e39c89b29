"""Baselines for trained models: n-gram models."""
