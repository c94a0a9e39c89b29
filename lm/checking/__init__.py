"""What must hold for every model, measured on a tiny one: the properties of `python -m lm.check`."""
