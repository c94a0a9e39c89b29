"""The files of a run: config and summary, metrics, checkpoints; who may write to them, and how they
are checked.
"""
