"""The report of a sweep: its tables, its figures, and the pages that contain them."""
