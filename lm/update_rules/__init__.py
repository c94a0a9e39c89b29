"""Update rules of whole matrices, one file each. lm/optimizers.py has the rules of single numbers, and the table.

Axis letters: N, a batch of independent matrices (stacked layers, experts); I, inputs: the axes that a product
contracts; O, outputs.
"""
