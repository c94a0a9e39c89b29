"""The axes of a sweep: combinators, sizes, and values to be computed."""

import pytest

from lm.sweeps.design.axes import Match, each, expand, match_params, match_rate, match_tokens, product, zipped


def test_combinators():
    norms, widths = each("model.norm", "rms", "layer"), {"wide": {"model.d_ff": 8}, "narrow": {"model.d_ff": 4}}
    assert product(norms, widths) == {
        "rms, wide": {"model.norm": "rms", "model.d_ff": 8},
        "rms, narrow": {"model.norm": "rms", "model.d_ff": 4},
        "layer, wide": {"model.norm": "layer", "model.d_ff": 8},
        "layer, narrow": {"model.norm": "layer", "model.d_ff": 4},
    }
    assert zipped(norms, widths) == {
        "rms, wide": {"model.norm": "rms", "model.d_ff": 8},
        "layer, narrow": {"model.norm": "layer", "model.d_ff": 4},
    }
    with pytest.raises(ValueError, match=r"each\('model.norm'\): no values"):
        each("model.norm")
    with pytest.raises(ValueError, match="zip"):
        zipped(norms, each("model.d_ff", 1))
    with pytest.raises(ValueError, match="product: an axis has no variants"):
        product(norms, {})
    with pytest.raises(ValueError, match="zipped: an axis has no variants"):
        zipped({}, {})
    with pytest.raises(ValueError, match=r"each\('model.norm'\): \('rms', 'layer', 'rms'\) has duplicates"):
        each("model.norm", "rms", "layer", "rms")
    with pytest.raises(ValueError, match=r"rms, 4: two axes set model\.norm"):
        product(norms, {"4": {"model.norm": "layer"}})


def test_every_variant_at_every_size():
    variants = {"a": {"model.d_ff": 7}, "b": {"model.d_ff": match_params("a")}}
    sizes = {
        "small": {"model.d_model": 8, "model.d_ff": 9},
        "large": {"optimizer.learning_rate": match_rate("small", 2)},
    }
    assert expand(variants, sizes) == {
        "a, small": {"model.d_model": 8, "model.d_ff": 7},
        "b, small": {"model.d_model": 8, "model.d_ff": Match("params", "a, small")},
        "a, large": {"optimizer.learning_rate": Match("rate", "a, small", 2), "model.d_ff": 7},
        "b, large": {
            "optimizer.learning_rate": Match("rate", "b, small", 2), "model.d_ff": Match("params", "a, large"),
        },
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf")])
def test_factors_must_be_positive(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        match_tokens(wrong)
    with pytest.raises(ValueError, match="must be positive"):
        match_rate("64", wrong)
