"""Times of collectives against calculations by hand."""

import pytest
from tiny import tiny

from lm.config import MESH_AXES
from lm.cost.communication import Transfer, devices_per_group, seconds, transfers
from lm.cost.devices import DEVICES, Device

H100 = DEVICES["h100"]  # 450 GB/s within nodes of 8, 50 GB/s per device beyond


def sizes(*numbers):
    return dict(zip(MESH_AXES, numbers, strict=True))


GROUPS = [  # mesh, axes of a collective, its devices in each group of 8
    ((8, 8, 1, 1), ("fsdp",), 8),
    ((8, 8, 1, 1), ("replica",), 1),
    ((16, 4, 1, 1), ("replica",), 2),
    ((1, 64, 1, 1), ("fsdp",), 8),
    ((1, 16, 4, 1), ("fsdp",), 2),
    ((1, 16, 4, 1), ("tensor",), 4),
    ((2, 1, 2, 4), ("replica", "sequence"), 4),
    ((1, 12, 1, 1), ("fsdp",), 4),  # a node and half a node
    ((1, 1, 3, 4), ("tensor",), 1),  # 0, 4 and 8: two of them in the first node
]


def test_devices_per_group():
    for mesh, axes, expected in GROUPS:
        assert devices_per_group(8, sizes(*mesh), axes) == expected


def test_times_of_rings_by_hand():
    """Each device sends 450 GB; a ring leaves each node once, and as many rings as devices share
    the node's ports.
    """

    def time(device, n, axes, mesh):
        gather = Transfer("", "all-gather", axes, n, payload=n / (n - 1) * 450e9, times=1)
        return seconds(gather, device, sizes(*mesh))

    assert time(H100, 8, ("fsdp",), (8, 8, 1, 1)) == pytest.approx(1)  # the links of a node
    # all ports of a node
    assert time(H100, 64, ("fsdp",), (1, 64, 1, 1)) == pytest.approx(450 / (8 * 50))
    assert time(H100, 8, ("replica",), (8, 8, 1, 1)) == pytest.approx(450 / 50)  # one port
    pcie = Device("NVIDIA", {}, 0, 0, link=32e9, group=8, network=25e9, per_host=8)
    # the link is slower than 8 ports
    assert time(pcie, 64, ("fsdp",), (1, 64, 1, 1)) == pytest.approx(450 / 32)


def test_over_slices_each_device_sends_its_part_of_the_sum_of_its_slice():
    """Gradients of 1000 bytes per device are scattered over 4 replicas of a slice, so that 250 of
    them cross.
    """
    config = tiny(train={"batch_size": 16})
    (once,) = (t for t in transfers(config, sizes(8, 2, 1, 1)) if t.axes == ("replica",))
    scattered, crossing, gathered = (
        t
        for t in transfers(config, sizes(8, 2, 1, 1), n_slices=2)
        if t.axes in (("replica",), ("slices",))
    )
    assert (once.kind, scattered.kind, crossing.kind, gathered.kind) == (
        "all-reduce", "reduce-scatter", "all-reduce", "all-gather"
    )  # fmt: skip
    assert (scattered.payload, gathered.payload, crossing.payload) == (
        once.payload,
        once.payload,
        once.payload / 4,
    )
    assert (scattered.n, crossing.n, crossing.sent) == (4, 2, once.payload / 4)
    v5e = DEVICES["v5e"]
    assert seconds(crossing, v5e, sizes(8, 2, 1, 1)) == pytest.approx(
        once.payload / 4 / v5e.network
    )
    (alone,) = (
        t
        for t in transfers(config, sizes(2, 8, 1, 1), n_slices=2)
        if {"replica", "slices"} & {*t.axes}
    )
    assert (alone.axes, alone.kind) == (("slices",), "all-reduce")


def test_a_table_of_values_by_token_is_not_sharded_over_fsdp_and_its_gradient_is_summed_whole():
    """In the second of 2 layers: 19 tokens, 2 heads of 4, in float32."""
    config = tiny(model={"value_embeddings": True}, train={"batch_size": 16})
    (table,) = (t for t in transfers(config, sizes(2, 4, 1, 1)) if t.axes == ("replica", "fsdp"))
    assert (table.kind, table.n, table.payload, table.times) == ("all-reduce", 8, 19 * 2 * 4 * 4, 1)


@pytest.mark.parametrize(("remat", "per_layer"), [("none", 4), ("block", 6)])
def test_qk_norm_over_all_heads_sums_one_number_per_token_over_tensor(remat, per_layer):
    """As in the program that jax 0.10.2 compiles for two CPU devices: float32 of shape (4, 24) in
    each of 3 layers.
    """
    model = {"qk_norm": True, "qk_norm_over": "all_heads", "n_layers": 3, "remat": remat}
    config = tiny(model=model, train={"batch_size": 4, "seq_len": 24})
    (squares,) = (t for t in transfers(config, sizes(1, 1, 2, 1)) if "squares" in t.what)
    assert (squares.kind, squares.payload, squares.times) == (
        "all-reduce",
        4 * 4 * 24,
        3 * per_layer,
    )
    per_head = tiny(model=model | {"qk_norm_over": "head"})
    assert not [t for t in transfers(per_head, sizes(1, 1, 2, 1)) if "squares" in t.what]
