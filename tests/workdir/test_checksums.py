"""Checksums of checkpoints detect every flipped bit and every exchange, and do not depend on the
sharding.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import python

from lm.workdir.checkpoints import restore_params
from lm.workdir.checksums import leaf_checksums


def checksum(x) -> str:
    return leaf_checksums({"x": x})["x"]


def checksum_by_definition(words: list[int]) -> str:
    """Return the documented sums, computed with Python integers."""
    sums = []
    for shift in (0, 16):
        for index_shift in (0, 16):
            products = (
                ((w >> shift) & 0xFFFF) * (((i >> index_shift) & 0xFFFF) + 1)
                for i, w in enumerate(words)
            )
            sums.append(f"{sum(products) % 2**32:08x}")
    return "".join(sums)


def test_checksums_follow_their_definition():
    for dtype in ("float32", "int32", "uint32", "bfloat16", "float16", "int8", "uint8", "bool"):
        x = jnp.asarray(np.random.default_rng(0).integers(-100, 100, (5, 1, 7)), dtype)
        raw = np.asarray(x)
        words = raw.reshape(-1).view(f"uint{8 * raw.dtype.itemsize}").tolist()
        assert checksum(x) == checksum_by_definition(words)
    assert checksum(jnp.int32(5)) == checksum_by_definition([5])
    assert checksum(jnp.zeros((0, 3))) == checksum_by_definition([])


WORDS = np.random.default_rng(1).integers(0, 2**32, 2**16 + 300, dtype=np.uint32)


@settings(max_examples=100, deadline=None)
@given(index=st.integers(0, WORDS.size - 1), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_the_checksum(index, bit):
    flipped = WORDS.copy()
    flipped[index] ^= np.uint32(1 << bit)
    assert checksum(flipped) != checksum(WORDS)


positions = st.integers(0, WORDS.size - 1)
pairs = st.one_of(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.integers(0, 2**32 - 1).map(
        lambda word: (word, word ^ 2**31)
    ),  # x and -x: a plain weighted sum would not change
    st.tuples(st.integers(0, 31), st.integers(0, 31)).map(
        lambda bits: (1 << bits[0], 1 << bits[1])
    ),
)


@settings(max_examples=200, deadline=None)
@given(i=positions, j=st.one_of(positions, st.sampled_from([0, 2**15, 2**16])), words=pairs)
def test_any_exchange_of_two_unequal_elements_changes_the_checksum(i, j, words):
    if i == j or words[0] == words[1]:
        return
    there, back = WORDS.copy(), WORDS.copy()
    there[i], there[j] = words
    back[j], back[i] = words
    assert checksum(there) != checksum(back)


ON_DEVICES = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from lm.workdir.checkpoints import Checkpoints, restore_params
from lm.workdir.checksums import _checksum, leaf_checksums
from lm.cost.hlo import parse_collectives
x = np.random.default_rng(0).standard_normal((8, 16, 3)).astype(np.float32)
sums = set()
placed = {}
layouts = [((1,), P("a")), ((2,), P("a")), ((8,), P("a")), ((2, 4), P("b", "a"))]
for shape, spec in layouts:
    names = ("a", "b")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, devices=devices, axis_types=(AxisType.Auto,) * len(shape))
    placed[shape, spec] = y = jax.device_put(x, NamedSharding(mesh, spec))
    sums.add(leaf_checksums({"x": y})["x"])
print("sums", *sums)
# Devices exchange partial sums only, never a shard of the leaf.
sent = parse_collectives(_checksum(mesh).lower(y).compile().as_text())
assert sent and max(c.payload for c in sent) < x.nbytes // 8, sent
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"params": {"x": placed[(8,), P("a")]}}, {})
target = placed[(2, 4), P("b", "a")]
step, state, _ = checkpoints.restore({"params": {"x": target}})
assert state["params"]["x"].sharding == target.sharding
assert np.array_equal(state["params"]["x"], x)
checkpoints.close()
"""


@pytest.mark.slow
def test_1_2_and_8_devices_agree_and_restore_each_others_checkpoints(tmp_path):
    printed = python(ON_DEVICES, tmp_path)
    x = np.random.default_rng(0).standard_normal((8, 16, 3)).astype(np.float32)
    assert f"sums {checksum(x)}\n" in printed
    _, params, _ = restore_params(tmp_path)  # written by eight devices, read by one
    assert np.array_equal(params["x"], x)
