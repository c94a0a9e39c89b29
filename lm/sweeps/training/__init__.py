"""Train the runs of a sweep: prepare the variants, choose the runs, train those of one program together."""
