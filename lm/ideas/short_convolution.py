"""Short causal convolution: y_t = x_t + sum_j w_j x_{t-3+j}, j = 0 .. 3.

On the keys (after their rotation), the values or the stream before each block, with a filter for
each feature. w = 0 at step 0: the model starts as the one without it.

The equation is that of Canon layers (Allen-Zhu 2025, arXiv:2512.17351), the places are others.
Canon A and C are on the inputs of attention and the feed-forward layer, after the norm. Here
"stream" is before the norm, and what it adds stays in the residual stream. Canon B is on queries,
keys and values before the rotation, and Canon D inside the feed-forward layer.
"""

import dataclasses

import jax.numpy as jnp

from lm.declarations import small_weight

KERNEL = 4


@dataclasses.dataclass(frozen=True)
class ShortConvolution:
    """The convolution at one site; `place` is "keys", "values" or "stream"."""

    place: str

    @property
    def axes(self) -> str:
        """The axes of the features."""
        return "D" if self.place == "stream" else "GK"

    @property
    def weight(self) -> str:
        """The name of the filters."""
        return f"w_conv_{self.place}_J{self.axes}"

    def table(self, c):
        sizes = {"J": KERNEL, "D": c.d_model, "G": c.n_kv_heads, "K": c.d_head}
        axes = f"J{self.axes}"
        shape = tuple(sizes[axis] for axis in axes)
        return {self.weight: small_weight(shape, axes, "J", batch=self.axes)}

    def same_at_start(self, c):
        return True

    def apply(self, here, value):
        if self.place == "keys":
            q_BTHK, k_BTGK = value
            return q_BTHK, self._convolve(here, k_BTGK)
        return self._convolve(here, value)

    def _convolve(self, here, x):
        flat_BTC = x if self.place == "stream" else x.reshape(*x.shape[:-2], -1)
        w_JC = here.p[self.weight].reshape(KERNEL, -1)
        last_BTJC = here.last(f"conv_{self.place}", flat_BTC, KERNEL)
        y_BTC = jnp.einsum("...JC,JC->...C", last_BTJC, w_JC.astype(x.dtype))
        return x + y_BTC.reshape(x.shape)


keys = ShortConvolution("keys")
values = ShortConvolution("values")
stream = ShortConvolution("stream")
