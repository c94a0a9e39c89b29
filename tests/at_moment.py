"""Run lm.train and send it a signal at a given moment: python at_moment.py ACTION MOMENT COUNT
ARGUMENTS...

ACTION: the name of a signal (KILL, TERM, INT), or SLEEP or SLEEP=SECONDS: print "sleeping" and sleep (ten minutes).
MOMENT: data        before the data is opened for the COUNT-th time
        log         before the COUNT-th line is written to metrics.jsonl; the device has already received its steps
        evaluation  before the COUNT-th batch, counted over all evaluations
        save        after the COUNT-th checkpoint is written, and before it is renamed to its final name
Except at "save", every save blocks until it is on disk, so that the files at a moment do not depend on timing.
"""

import itertools
import os
import signal
import sys
import time


def act(action: str) -> None:
    if action.startswith("SLEEP"):
        print("sleeping", flush=True)
        time.sleep(float(action.partition("=")[2] or 600))
    else:
        os.kill(os.getpid(), getattr(signal, f"SIG{action}"))


def main(action: str, moment: str, count: str, *arguments: str) -> int:
    from lm import data, train
    from lm.training import batch_source
    from lm.workdir import checkpoints, metrics

    if action == "HUP":
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    calls = itertools.count(1)

    def maybe_act() -> None:
        if next(calls) == int(count):
            act(action)

    def acting(function):
        def acting_first(*args, **kwargs):
            maybe_act()
            return function(*args, **kwargs)

        return acting_first

    eval_inputs, save, rename = (
        batch_source.BatchSource.evaluation,
        checkpoints.Checkpoints.save,
        os.rename,
    )

    def acting_inputs(*args, **kwargs):
        for inputs in eval_inputs(*args, **kwargs):
            maybe_act()
            yield inputs

    def acting_rename(source, target, **kwargs):
        if os.path.basename(target).isdigit():  # checkpoints are named by their steps
            maybe_act()
        rename(source, target, **kwargs)

    def waiting_save(self, *args, **kwargs):
        saved = save(self, *args, **kwargs)
        self.wait()
        return saved

    if moment == "save":
        os.rename = acting_rename
    else:
        checkpoints.Checkpoints.save = waiting_save
    if moment == "data":
        data.open_corpus = acting(data.open_corpus)
    if moment == "log":
        metrics.MetricsWriter.write = acting(metrics.MetricsWriter.write)
    if moment == "evaluation":
        batch_source.BatchSource.evaluation = acting_inputs
    return train.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
