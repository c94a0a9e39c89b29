"""Faster forms of products, attention and the softmax, where XLA's own program is slow or inexact.

lm/layers calls them and has the plain form beside each call; tests compare both in values and
gradients.
"""
