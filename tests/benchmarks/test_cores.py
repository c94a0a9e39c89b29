"""What more cores gain in training."""

from benchmarks import cores


def test_ratios_above_1_mean_that_the_second_side_is_faster():
    seconds = {"ours, 1 core": 2.0, "ours": 1.0, "ours, a device per core": 0.8, "torch, 1 core": 3.0, "torch": 2.0}
    rows = [{"shape": "S", "cores": 2, "seconds": {side: [one] * 3 for side, one in seconds.items()}}]
    header, _, line, *_ = cores.table(rows).splitlines()
    shown = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert shown["ours, 1 core / ours"] == "**2.00** (2.00 to 2.00)"
    assert shown["torch, 1 core / torch"] == "**1.50** (1.50 to 1.50)"
    assert shown["ours / ours, a device per core"] == "**1.25** (1.25 to 1.25)"
    assert shown["torch / ours"] == "**2.00** (2.00 to 2.00)"
    assert shown["ms a step: ours"] == "1000.0"


def test_one_side_of_each_kind_is_limited_to_one_core():
    sides = cores.sides_of(4)
    assert {name: (side["cores"], side.get("devices", 1)) for name, side in sides.items()} == {
        "ours, 1 core": (1, 1), "ours": (4, 1), "ours, a device per core": (4, 4), "torch, 1 core": (1, 1),
        "torch": (4, 1),
    }  # fmt: skip
