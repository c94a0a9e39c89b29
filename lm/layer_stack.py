"""Repeat a block over the depth: unrolled or scanned, with rematerialization, over stacked parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.config import ModelConfig, layer_windows
from lm.layers.attention import UNLIMITED
from lm.layers.linear import PRODUCT
from lm.parallel import collectives

# What jax.checkpoint saves for the backward pass, by config.model.remat; all else is recomputed.
REMAT_POLICIES = {
    "none": collectives.save_all_but_gathered,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT),
    ),
    "block": jax.checkpoint_policies.nothing_saveable,
}


def apply_layers(block: type[nn.Module], c: ModelConfig, x_BTD, context):
    """Apply n_layers blocks to x_BTD, inside a compact method of a Linen module.

    Args:
        block: module class, called as block(c)(x_BTD, context, layer, window).
        c: model section of a resolved config.
        x_BTD: input of the first block.
        context: passed to every block; its `positions` are None for 0 .. T-1.

    Returns:
        (B, T, D), the output of the last block.
    """
    # Windows of at least the sequence's length are dropped: they do not change the program.
    seq_len = collectives.global_seq_len(x_BTD.shape[-2]) if context.positions is None else UNLIMITED
    windows = [window if 0 < window < seq_len else None for window in layer_windows(c)]
    return (_scan if c.scan_layers else _unroll)(block, c, x_BTD, context, windows)


def _unroll(block, c, x_BTD, context, windows):
    block = _rematerialize(block, c, static_window=True)
    for layer, window in enumerate(windows):
        x_BTD = block(c, name=f"layers_{layer}")(x_BTD, context, layer, window)
    return x_BTD


def _scan(block, c, x_BTD, context, windows):
    """Scan one compiled block over the stacked parameters. If all windows are equal the window stays static, which
    fused kernels need; otherwise it is traced.
    """
    static = len(set(windows)) == 1

    def apply(module, x_BTD, layer, window):
        return module(x_BTD, context, layer, windows[0] if static else window), None

    axes = {"params": 0, "intermediates": 0}
    scan = nn.scan(apply, variable_axes=axes, split_rngs={}, length=c.n_layers)
    stack = _rematerialize(block, c, static_window=static)(c, name="layers")
    window_N = jnp.asarray([window or UNLIMITED for window in windows])
    return scan(stack, x_BTD, jnp.arange(c.n_layers), window_N)[0]


def _rematerialize(block, c, static_window):
    """Return the block with the checkpoint policy of config.model.remat. Gathered parameters are never saved."""
    if c.remat == "none" and not collectives.gathers_parameters():
        return block
    static = (4,) if static_window else ()  # the window's place among the arguments of block.__call__, self included
    return nn.remat(block, policy=REMAT_POLICIES[c.remat], prevent_cse=not c.scan_layers, static_argnums=static)


def stack_layers(tree: dict) -> dict:
    """Replace layers_0, layers_1, ... by one stack "layers". The inverse of `unstack_layers`."""
    layers = sorted((name for name in tree if name.startswith("layers_")), key=lambda name: int(name[7:]))
    others = {name: value for name, value in tree.items() if name not in layers}
    return others | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[name] for name in layers))}


def unstack_layers(tree: dict) -> dict:
    """Replace the stack "layers" by layers_0, layers_1, ..., which an unrolled model reads; without one, do nothing."""
    others = {name: value for name, value in tree.items() if name != "layers"}
    leaves, structure = jax.tree.flatten(tree.get("layers", {}))
    layers = zip(*map(_rows, leaves), strict=True)
    return others | {f"layers_{i}": jax.tree.unflatten(structure, layer) for i, layer in enumerate(layers)}


@jax.custom_vjp
def _rows(x):
    return tuple(x[i] for i in range(len(x)))


# JAX's own derivative would sum one padded array of the full stack's size per row.
_rows.defvjp(lambda x: (_rows(x), None), lambda _, rows: (jnp.stack(rows),))
