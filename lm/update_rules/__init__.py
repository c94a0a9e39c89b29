"""Update rules, one file each: of whole matrices, and schedule_free. lm/optimizers.py has the table
of all rules.

Axis letters: N, a batch of independent matrices (stacked layers, experts); I, inputs: the axes that
a product contracts; O, outputs.
"""
