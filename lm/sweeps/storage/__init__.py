"""The directory of a sweep: its description, its finished runs, and the readers that check both."""
