"""Pure functions of arrays: the mathematics of the model, without parameters, Flax or config.

The last letters of an array's name are its axes. This key is used in the whole code base:

    B  batch (any leading dimensions)    D  model width (d_model)      V  vocabulary
    T  query positions, or tokens        F  feed-forward width         N  layers
    S  key and value positions           H  query heads
    K  width of one head (d_head)        G  key and value heads (grouped-query attention)

For bfloat16 and float16 inputs, statistics and softmax are computed in float32 and the result has the input's dtype.
"""
