"""Arguments that several commands have, and what they mean. Imports no jax."""
