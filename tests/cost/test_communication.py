"""Times of collectives against calculations by hand."""

import pytest
from tiny import tiny

from lm.config import MESH_AXES
from lm.cost.communication import Transfer, devices_per_group, seconds, transfers
from lm.cost.devices import DEVICES, Device

H100 = DEVICES["h100"]  # 450 GB/s within nodes of 8, 50 GB/s per device beyond


def sizes(*numbers):
    return dict(zip(MESH_AXES, numbers, strict=True))


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        ((8, 8, 1, 1), ("fsdp",), 8),
        ((8, 8, 1, 1), ("replica",), 1),
        ((16, 4, 1, 1), ("replica",), 2),
        ((1, 64, 1, 1), ("fsdp",), 8),
        ((1, 16, 4, 1), ("fsdp",), 2),
        ((1, 16, 4, 1), ("tensor",), 4),
        ((2, 1, 2, 4), ("replica", "sequence"), 4),
        ((1, 12, 1, 1), ("fsdp",), 4),  # a node and half a node
        ((1, 1, 3, 4), ("tensor",), 1),  # 0, 4 and 8: two of them in the first node
    ],
)
def test_devices_per_group(mesh, axes, expected):
    assert devices_per_group(8, sizes(*mesh), axes) == expected


def all_gather(n, axes):
    """Return a collective for which each device sends 450 GB. Latencies are less than a millisecond."""
    return Transfer("", "all-gather", axes, n, payload=n / (n - 1) * 450e9, times=1)


def test_a_ring_within_a_node_uses_its_links():
    assert seconds(all_gather(8, ("fsdp",)), H100, sizes(8, 8, 1, 1)) == pytest.approx(1, abs=1e-3)


def test_a_ring_over_whole_nodes_shares_all_ports_of_a_node():
    """Eight rings, each of which leaves a node through its own port with an eighth of the bytes."""
    assert seconds(all_gather(64, ("fsdp",)), H100, sizes(1, 64, 1, 1)) == pytest.approx(450 / (8 * 50), abs=1e-3)


def test_a_ring_over_one_device_per_node_uses_one_port():
    assert seconds(all_gather(8, ("replica",)), H100, sizes(8, 8, 1, 1)) == pytest.approx(450 / 50, abs=1e-3)


def test_a_slow_link_within_the_node_limits_a_ring_beyond_it():
    """PCIe cards with a fast network: 32 GB/s within a node, 8 x 25 GB/s beyond."""
    device = Device("NVIDIA", {}, 0, 0, link=32e9, group=8, network=25e9, per_host=8)
    assert seconds(all_gather(64, ("fsdp",)), device, sizes(1, 64, 1, 1)) == pytest.approx(450 / 32, abs=1e-3)


def test_latency_by_hand():
    """A ring of 64 hops, 8 of them between nodes; a tree of 8 = 2^3 nodes, up and down; 3.4 and 14 us per hop."""
    mesh, no_bytes = sizes(1, 64, 1, 1), {"payload": 0.0, "times": 2, "parts": 5}
    gather = Transfer("", "all-gather", ("fsdp",), 64, **no_bytes)
    assert seconds(gather, H100, mesh) == pytest.approx(10 * (56 * 3.4e-6 + 8 * 14e-6))
    within = Transfer("", "reduce-scatter", ("fsdp",), 8, **no_bytes)
    assert seconds(within, H100, sizes(1, 8, 1, 1)) == pytest.approx(10 * 7 * 3.4e-6)
    total = Transfer("", "all-reduce", ("replica",), 8, **no_bytes)
    assert seconds(total, H100, sizes(8, 8, 1, 1)) == pytest.approx(10 * 6 * 14e-6)


@pytest.mark.parametrize(("remat", "per_layer"), [("none", 4), ("block", 6)])
def test_qk_norm_over_all_heads_sums_one_number_per_token_over_tensor(remat, per_layer):
    """As in the program that jax 0.10.2 compiles for two CPU devices: float32 of shape (4, 24) in each of 3 layers."""
    model = {"qk_norm": True, "qk_norm_over": "all_heads", "n_layers": 3, "remat": remat}
    config = tiny(model=model, train={"batch_size": 4, "seq_len": 24})
    (squares,) = (t for t in transfers(config, sizes(1, 1, 2, 1)) if "squares" in t.what)
    assert (squares.kind, squares.payload, squares.times) == ("all-reduce", 4 * 4 * 24, 3 * per_layer)
    per_head = tiny(model=model | {"qk_norm_over": "head"})
    assert not [t for t in transfers(per_head, sizes(1, 1, 2, 1)) if "squares" in t.what]
