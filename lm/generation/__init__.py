"""Generation of text: the cache of keys and values, the filters, and the sampling loop."""
