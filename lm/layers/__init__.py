"""Pure functions of arrays: the mathematics of the model, with no parameters, no Flax and no configuration.

Array names end in one letter per axis. The key, used in the whole code base:

    B  batch (any leading dimensions)    D  model width (d_model)      V  vocabulary
    T  query positions, or tokens        F  feed-forward width         N  layers
    S  key and value positions           H  query heads
    K  width of one head (d_head)        G  key and value heads (grouped-query attention)

Options are keyword-only. Where the input is bfloat16 or float16, statistics and softmax are computed in float32 and
the result is returned in the input's dtype.
"""
