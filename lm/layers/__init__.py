"""Pure functions of arrays: the mathematics of the model, without parameters, Flax or config.

The last letters of an array's name are its axes. This key is used in the whole code base:

    B  batch (any leading dimensions)    D  model width (d_model)      V  vocabulary
    T  query positions, or tokens        F  feed-forward width         N  layers, or matrices of a stack
    S  key and value positions           H  query heads                E  experts
    K  width of one head (d_head)        G  key and value heads (grouped-query attention)

Sharding (RULES of lm/parallel/sharding.py) and muP (WIDTHS of lm/optimizers.py) go by D, V, H, G, F and K in the axes
of a parameter, so these have no other meaning there. 1 is an axis of length 1. All other letters, and E where there are
no experts, belong to their file: C, the features or streams of an idea, chunks, or B G in a cache; I, O, a matrix's
inputs and outputs; J, taps of a filter; M, X, Y, maps, flattened and earlier outputs of a residual idea; Q, pairs of
heads; R, runs, likely tokens, or queries that share a key; k, chosen experts; n, positions.

For bfloat16 and float16 inputs, statistics and softmax are computed in float32 and the result has the input's dtype.
"""
