"""Inject faults into runs, caches, data, configs and sweeps, and judge the outcomes automatically.

`python -m benchmarks.faults --rounds N` runs the campaign; tests/faults/ runs a part of it. The
verdicts:

    survived    the command ended with exit code 0, and its result equals that of an undisturbed run to the last
                bit; or it ended with an error that names the cause (exit code 1 or 2), and nothing intact was lost:
                after the fault is undone, the same command gives the undisturbed result
    lost        something that was intact was deleted or changed
    silent      exit code 0, another result, and no warning
    traceback   a Python traceback or a crash reached the user, the command hung, or its error names no cause
"""
