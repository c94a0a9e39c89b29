"""The table of devices, against published figures."""

import numpy as np
import pytest

from lm.cost.devices import DEVICES, parse_device, peak_flops
from lm.system.errors import UserError


def test_peaks_are_exact_and_dense():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3", np.dtype("float32")) == 494.7e12
    for unknown in (("cpu", "float32"), ("NVIDIA H100", "bfloat16"), ("TPU v4", "float32")):
        assert peak_flops(*unknown) is None
    # each kind is listed once
    assert len({device.kind for device in DEVICES.values()}) == len(DEVICES)


def test_parse_device():
    assert parse_device("v5p:256") == parse_device("v5p:256", 2) == ("v5p", 256)
    for text, n_slices in (("v5p:256", 3), ("v5p:256", 0), ("h100:16", 2)):
        with pytest.raises(UserError, match=rf"--slices: {n_slices} does not divide {text}"):
            parse_device(text, n_slices)
    assert parse_device("h100") == ("h100", 1)
    for text in (
        "h100:",
        "h900:8",
        "h100:0",
        "h100:x",
        "",
        "h100:²",
        "h100:" + "9" * 5000,
        "h100:100000",
    ):
        with pytest.raises(UserError, match=r"is not NAME:COUNT.*h100"):
            parse_device(text)
