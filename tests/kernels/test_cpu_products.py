"""Products on a CPU: values and gradients, under vmap, and the form that XLA:CPU computes fast."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import normal
from jax.experimental.layout import Layout, with_layout_constraint
from running import slow

from lm.kernels import cpu_products
from lm.layers.linear import einsum, project_to_float32


@pytest.mark.parametrize("batch", [slow(()), (2, 3)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "rounding"), [(jnp.bfloat16, 2.0**-8), (jnp.float32, 2.0**-22)])
def test_products_on_a_cpu_equal_exact_products_up_to_rounding(dtype, rounding, transposed, batch):
    for n_in, n_out in ((8, 7), (7, 8), (64, 64)):  # each order of the factors of a gradient
        shapes = (5, n_in), (n_in, n_out), (5, n_out)
        a, b, g = (
            jnp.asarray(normal(*batch, *shape, seed=i), dtype) for i, shape in enumerate(shapes)
        )
        a64, b64, g64 = (np.asarray(m, np.float64) for m in (a, b, g))
        given = jnp.swapaxes(b, -1, -2) if transposed else b
        y, vjp = jax.vjp(jax.jit(lambda a, b: cpu_products.matmul(a, b, transposed)), a, given)
        d_a, d_b = vjp(g.astype(jnp.float32))
        d_b = jnp.swapaxes(d_b, -1, -2) if transposed else d_b
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, a64 @ b64, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(
            np.float64(d_a), g64 @ np.swapaxes(b64, -1, -2), rtol=rounding, atol=1e-5
        )
        np.testing.assert_allclose(
            np.float64(d_b), np.swapaxes(a64, -1, -2) @ g64, rtol=rounding, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float32)])
def test_vmap_of_products_on_a_cpu_equals_a_loop_also_outside_of_jit(dtype):
    a_NBTK, b_BKS, g_BTS = (
        jnp.asarray(normal(*shape), dtype) for shape in ((2, 3, 5, 8), (3, 8, 7), (3, 5, 7))
    )

    def both(a_BTK):
        y_BTS, vjp = jax.vjp(lambda a, b: cpu_products.matmul(a, b, False), a_BTK, b_BKS)
        return y_BTS, *vjp(g_BTS.astype(y_BTS.dtype))

    for n, one in enumerate(map(both, a_NBTK)):
        for x, expected in zip(jax.vmap(both)(a_NBTK), one, strict=True):
            np.testing.assert_allclose(
                np.float64(x[n]), np.float64(expected), rtol=2.0**-7, atol=1e-2
            )
    # Many gradients of one product, as for a Jacobian, in and outside of jit.
    pullback = jax.vjp(lambda a: cpu_products.matmul(a, b_BKS, False), a_NBTK[0])[1]
    g_NBTS = jnp.asarray(normal(4, 3, 5, 7), jnp.float32)
    for gradients in (jax.jit(jax.vmap(pullback))(g_NBTS), jax.vmap(pullback)(g_NBTS)):
        for found, g in zip(gradients[0], g_NBTS, strict=True):
            expected = np.einsum("BTS,BKS->BTK", np.float64(g), np.float64(b_BKS))
            np.testing.assert_allclose(np.float64(found), expected, rtol=2.0**-6, atol=5e-2)


@pytest.mark.xfail(
    tuple(map(int, jax.__version__.split(".")[:2])) < (0, 13),
    strict=True,
    reason="JAX 0.10.2 to 0.12.0 return the transpose; once this passes, the barrier can go",
)
def test_jax_keeps_the_order_of_numbers_behind_a_layout_constraint_under_vmap():
    """Right in no version yet: the layout of a result that jit compiles for vmap is forgotten."""
    rows = Layout((0, 1, 2))

    @jax.jit
    def product(a_BTK):
        y_BTS = jnp.einsum("BTK,BKS->BTS", with_layout_constraint(a_BTK, rows), b_BKS)
        return with_layout_constraint(y_BTS, rows)

    a_NBTK, b_BKS = (jnp.asarray(normal(*shape)) for shape in ((2, 3, 5, 8), (3, 8, 7)))
    expected = np.einsum("NBTK,BKS->NBTS", a_NBTK, b_BKS)
    np.testing.assert_allclose(jax.vmap(product)(a_NBTK), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="cpu_products is for CPUs")
@pytest.mark.parametrize(
    ("mesh", "enabled"),
    [
        ({}, True),
        ({"run": 2}, True),
        ({"sequence": 2}, True),
        ({"replica": 2, "fsdp": 1}, True),
        ({"replica": 2, "fsdp": 2}, False),
        ({"tensor": 2}, False),
    ],
)
def test_float32_uses_the_fast_products_unless_parameters_are_sharded(mesh, enabled):
    x = jnp.ones(1)  # before the mesh: JAX 0.12 creates no arrays under an abstract mesh
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    ):
        assert cpu_products.enabled(x) == enabled


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="needed only for XLA:CPU's fast products"
)
@pytest.mark.parametrize(
    ("product", "of_w"),
    [
        (functools.partial(einsum, "BTD,DF->BTF"), (8, 6)),
        (functools.partial(project_to_float32, transposed=True), (7, 8)),
    ],
)
def test_16_bit_products_are_row_major_with_float32_results_on_a_cpu(product, of_w):
    """Forward and backward: XLA:CPU computes other 16-bit products at a quarter of the speed or
    slower.
    """
    x, w = jnp.ones((3, 5, 8), jnp.bfloat16), jnp.ones(of_w)
    grads = jax.jit(jax.grad(lambda x, w: product(x, w).astype(jnp.float32).sum(), argnums=(0, 1)))
    text = grads.lower(x, w).as_text()
    products = re.findall(
        r"dot_general.* : \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) -> tensor<\S+x(\w+)>", text
    )
    assert set(products) == {("bf16", "bf16", "f32")}
    assert "LayoutConstraint" in text
