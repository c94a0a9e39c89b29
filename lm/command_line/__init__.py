"""What several commands read from the command line: configs with overrides, checkpoints. Imports no
jax.
"""
