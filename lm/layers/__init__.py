"""Pure functions of arrays: the mathematics of the model, without parameters, Flax or config.

The last letters of an array's name are its axes. This key is used in the whole code base:

    B  batch (any leading dimensions)    D  model width (d_model)     V  vocabulary
    T  query positions, or tokens        F  feed-forward width        N  layers, stacked matrices
    S  key and value positions           H  query heads               E  experts
    K  width of one head (d_head)        G  key and value heads (grouped-query attention)

Sharding (RULES of lm/parallel/sharding.py) and muP (WIDTHS of lm/optimizers.py) read the letters D,
V, H, G, F and K of a parameter, which therefore have no other meaning in its axes. 1 is an axis of
length 1. The meaning of other letters, and of E without experts, depends on the file:

    C  features or streams of an idea, chunks, B G in a cache      I, O  inputs, outputs of a matrix
    R  runs, likely tokens, queries of one key, a narrow width     J     taps of a filter
    M, X, Y  maps, flattened and earlier outputs (residual ideas)  Q     pairs of heads
    P  rotated features of latent attention                        n     positions
    k  chosen experts

For bfloat16 and float16 inputs, statistics and softmax are computed in float32 and the result has
the input's dtype.
"""
