"""Faults put into a copy of `lm`, one at a time, to see whether `python -m lm.check` finds them."""
