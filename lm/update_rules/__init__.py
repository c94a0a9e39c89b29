"""Update rules, one file each; lm/optimizers.py has the table of all rules.

Axis letters: N, a batch of independent matrices (stacked layers, experts); I, inputs: the axes that
a product contracts; O, outputs.
"""
