"""Generation of text: a cache of keys and values, filters of the next token's distribution, and the
sampling loop.
"""
