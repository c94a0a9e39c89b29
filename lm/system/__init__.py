"""What the program asks of the operating system: files, locks, URLs, memory, the terminal, and JAX."""
