"""What a model declares: its parameters, with all that their consumers need to know.

Axes are named as in lm/layers/__init__.py: D, V, T, H, G, K, F, and N for stacked layers.
"""

import dataclasses
import math
from collections.abc import Sequence

from flax import traverse_util

from lm.config import ModelConfig, n_applied_layers, width_factor

KINDS = ("weight", "embedding", "norm", "bias")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    Attributes:
        shape, axes: lengths and one-letter names of its dimensions; for stacked layers both begin
            with N.
        kind: "weight", "embedding", "norm" or "bias", which weight decay, Muon and sharding
            distinguish.
        contract: the axes that its product contracts; "": no product, or only a lookup. A token
            then costs one multiplication and addition per element.
        batch: axes over which it is a batch of independent matrices: stacked layers, experts.
        products: how many products one token has with each of its elements, on average: k / E where
            a token uses k of E experts.
        init, std: a key of parameters.DISTRIBUTIONS, and the factor of its draws (0: no factor).
        layers: the layers that are stacked along N, in this order; None: it belongs to no layer.
        decay: whether weight decay applies to a weight.
        matrix: whether a weight is a matrix for Muon, muP and FSDP; otherwise it is small, as a
            gain is.

    Raises:
        ValueError: the axes do not fit the shape, `contract` or `batch`, or there is no such kind.
    """

    shape: tuple[int, ...]
    axes: str
    kind: str
    contract: str = ""
    batch: str = ""
    products: float = 1.0
    init: str = "zeros"
    std: float = 0.0
    layers: Sequence[int] | None = None
    decay: bool = True
    matrix: bool = True

    def __post_init__(self):
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"Parameter: axes {self.axes!r} must have one letter for each length of "
                f"{self.shape}"
            )
        if "N" in (self.axes if self.layers is None else self.axes[1:]):
            raise ValueError(
                f"Parameter: axes {self.axes!r}: N is the axis of stacked layers; use another "
                "letter"
            )
        for name, letters in {"contract": self.contract, "batch": self.batch}.items():
            if not set(letters) <= set(self.axes):
                raise ValueError(
                    f"Parameter: {name}={letters!r} is not in the axes {self.axes!r}; give "
                    f"{name}=..."
                )
        if self.kind not in KINDS:
            raise ValueError(
                f"Parameter: there is no kind {self.kind!r}; use one of {', '.join(KINDS)}"
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def initializer(self) -> str:
        return f"{self.init}({self.std:.4g})" if self.std else self.init

    @property
    def rows(self) -> tuple[int, ...]:
        """Return the dimensions that its product contracts."""
        return tuple(self.axes.index(letter) for letter in self.contract)

    @property
    def columns(self) -> tuple[int, ...]:
        """Return the dimensions that its product adds: neither contracted nor of the batch."""
        others = (*self.rows, *(self.axes.index(letter) for letter in self.batch))
        return tuple(i for i in range(len(self.shape)) if i not in others)

    @property
    def fan_in(self) -> int:
        """Return how many numbers its product sums; 1 without a product."""
        return math.prod(self.shape[i] for i in self.rows)

    @property
    def n_matrices(self) -> int:
        """Return how many independent matrices it is a batch of."""
        return math.prod(self.shape[self.axes.index(letter)] for letter in self.batch)

    @property
    def matmul_size(self) -> int:
        """Return how many of its elements take part in products of one token."""
        return round(self.products * self.size) if self.contract else 0

    @property
    def small(self) -> bool:
        """Return whether it is neither a matrix nor an embedding, such as a gain or a bias."""
        return self.kind in ("norm", "bias") or not self.matrix

    @property
    def between_features(self) -> bool:
        """Return whether it is a matrix between features, whose widths both grow with the model."""
        return self.kind == "weight" and self.matrix and "V" not in self.axes

    @property
    def outer(self) -> bool:
        """Return whether it is an embedding or the weight of the output head."""
        return self.kind == "embedding" or (
            self.kind == "weight" and self.matrix and "V" in self.axes
        )

    def stacked(self, layers: Sequence[int]) -> "Parameter":
        """Return the declaration of one stack for these layers."""
        return dataclasses.replace(
            self,
            shape=(len(layers), *self.shape),
            axes=f"N{self.axes}",
            batch=f"N{self.batch}",
            layers=layers,
        )

    def of_one_layer(self) -> "Parameter":
        """Return the declaration without the axis of layers; the inverse of `stacked`."""
        if self.layers is None:
            return self
        return dataclasses.replace(
            self, shape=self.shape[1:], axes=self.axes[1:], batch=self.batch[1:], layers=None
        )


class Table(dict):
    """Parameters by path. A missing path raises a KeyError that names the table.

    >>> Table("the table of a norm", {"scale_D": 1})["bias_D"]
    Traceback (most recent call last):
    KeyError: "the table of a norm has no parameter 'bias_D'; it has scale_D"
    """

    def __init__(self, name: str, parameters: dict):
        super().__init__(parameters)
        self.name = name

    def with_outer(self, outer: dict) -> "Table":
        """Return the parameters of a module together with those of the module around it."""
        return Table(self.name, {**outer, **self})

    def __missing__(self, path):
        raise KeyError(f"{self.name} has no parameter {path!r}; it has {', '.join(self)}")


def _gpt2_std(c: ModelConfig, d_in: int, d_out: int, residual: bool) -> float:
    return (
        0.02
        / math.sqrt(len(c.branches) * n_applied_layers(c) if residual else 1)
        / math.sqrt(width_factor(c))
    )


# (distribution, its std, std of embeddings), by config.model.init.
INITIALIZERS = {
    # N(0, 2/(d_in + d_out)) cut at 3 sigma (Glorot and Bengio 2010, cut as in Stanford's CS336).
    "glorot": (
        "truncated_normal",
        lambda c, d_in, d_out, residual: math.sqrt(2 / (d_in + d_out)),
        1.0,
    ),
    # N(0, 2/d_in) (He et al. 2015).
    "he": ("normal", lambda c, d_in, d_out, residual: math.sqrt(2 / d_in), 1.0),
    # N(0, 0.02^2), residual projections divided by the root of the number of all branches, which is
    # 2 n_layers by default (Radford et al. 2019).
    "gpt2": ("normal", _gpt2_std, 0.02),
}


def weight(
    c: ModelConfig,
    shape: tuple[int, ...],
    axes: str,
    *,
    contract: str = "D",
    batch: str = "",
    products: float = 1.0,
    residual: bool = False,
) -> Parameter:
    """Return the declaration of a weight with the config's initializer.

    For `shape` to `products` see `Parameter`. `residual`: it projects back into the residual
    stream.

    >>> weight(ModelConfig(init="he"), (8, 2, 4), "DHK").std  # sqrt(2 / 8)
    0.5
    """
    declared = Parameter(shape, axes, "weight", contract, batch, products)
    if residual and c.zero_init_residual:
        return declared
    distribution, std, _ = INITIALIZERS[c.init]
    d_out = math.prod(shape[i] for i in declared.columns)
    return dataclasses.replace(
        declared, init=distribution, std=std(c, declared.fan_in, d_out, residual)
    )


def small_weight(shape: tuple[int, ...], axes: str, contract: str = "", **more) -> Parameter:
    """Return the declaration of a weight without decay that Adam updates: a factor, or a gate's.

    `more` are further attributes of `Parameter`. It starts at 0 without `init`.
    """
    return Parameter(shape, axes, "weight", contract, decay=False, matrix=False, **more)


def bias(shape: tuple[int, ...], axes: str) -> Parameter:
    """Return the declaration of a bias, which starts at 0."""
    return Parameter(shape, axes, "bias")


def gain(shape: tuple[int, ...], axes: str) -> Parameter:
    """Return the declaration of a norm's gain, which starts at 1."""
    return Parameter(shape, axes, "norm", init="ones")


def nest(flat: dict) -> dict:
    """Return {"a": {"b": x}} for {"a/b": x}."""
    return traverse_util.unflatten_dict(flat, sep="/")


def flat(nested: dict) -> dict:
    """Return {"a/b": x} for {"a": {"b": x}}."""
    return traverse_util.flatten_dict(nested, sep="/")
