"""Make the inputs that the host sends to the device for each dispatch.

A split that fits on the device is sent there once, and each dispatch only needs the starts of its
windows. Otherwise the host gathers the tokens. The batch of a step is the same either way: see
`lm/data/batches.py`.
"""

import copy
import dataclasses
from collections.abc import Iterator

import numpy as np

from lm.config import Resolved
from lm.data import Split, batches
from lm.parallel import sharding
from lm.parallel.mesh import current_mesh


class BatchSource:
    """The batches of one split, for training and evaluation.

    Make it once per split and pass it down: the constructor copies the split to the devices if it
    fits. Inputs are a dict of arrays whose examples are sharded over the mesh: {"starts"} if the
    split is resident, else the gathered {"tokens"} (and {"segments"} of a packed split); evaluation
    adds {"weights"}. `step.take_batch` makes the batch.
    """

    def __init__(self, split: Split, config: Resolved):
        self.split = split
        self.config = config
        # a background thread, in which no mesh is set, makes the inputs
        self.mesh = mesh = current_mesh()
        # The split's arrays on every device; None if they are too large, or too long for int32.
        self.resident = None
        n_bytes = sum(array.nbytes for array in split.arrays.values())
        if n_bytes <= config.data.device_bytes and len(split.tokens) < 2**31:
            self.resident = {
                name: sharding.replicate(mesh, np.asarray(x)) for name, x in split.arrays.items()
            }

    def with_seed(self, seed: int) -> "BatchSource":
        """Return a source of another run's batches that shares this one's arrays."""
        source = copy.copy(self)
        train = dataclasses.replace(self.config.train, seed=seed)
        source.config = dataclasses.replace(self.config, train=train)
        return source

    def train(self, step: int, n_steps: int) -> dict:
        """Return the inputs of n_steps training steps from `step` on.

        They are stacked to (max(2, steps_per_dispatch), B, ...). n_steps is at most
        steps_per_dispatch; the windows of the steps beyond start at 0 and are not trained on. There
        are at least two, because XLA moves work out of a loop over one step, where it rounds
        differently: runs with steps_per_dispatch = 1 and 10 would not be bit-identical.
        """
        t = self.config.train
        starts = np.zeros((max(2, t.steps_per_dispatch), t.batch_size), np.int64)
        steps = np.arange(step, step + n_steps)
        starts[:n_steps] = batches.window_starts(self.split, self.config, steps)
        return self._inputs(starts)

    def evaluation(self, max_batches: int = 0) -> Iterator[dict]:
        """Yield the inputs of an evaluation in consecutive windows.

        These are at most max_batches of each source if not 0.
        """
        for _, numbers in batches.eval_batches(self.split, self.config, max_batches):
            for batch in numbers:
                starts, weights = batches.eval_windows(self.split, self.config, batch)
                weights = sharding.shard_examples(self.mesh, weights.shape, 0, weights.__getitem__)
                yield self._inputs(starts) | {"weights": weights}

    def _inputs(self, starts: np.ndarray) -> dict:
        """Return the starts (..., B), or the windows (..., B, T+1), gathered for these devices."""
        axis = starts.ndim - 1
        if self.resident is not None:
            starts = starts.astype(np.int32)
            sharded = sharding.shard_examples(self.mesh, starts.shape, axis, starts.__getitem__)
            return {"starts": sharded}
        seq_len = self.config.train.seq_len
        shape = (*starts.shape, seq_len + 1)

        def windows(name: str):
            def gather(index):
                array = {name: self.split.arrays[name]}
                return batches.gather(array, starts[index], seq_len)[name]

            return sharding.shard_examples(self.mesh, shape, axis, gather)

        return {name: windows(name) for name in self.split.arrays}
