"""From the finished runs of a sweep to its answers."""
