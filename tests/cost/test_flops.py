"""FLOP counts against published parameter counts, hand derivations and brute force over attention
masks.
"""

import numpy as np
import pytest
from products import forward_flops
from tiny import tiny

from lm import parameters
from lm.config import Config, ModelConfig
from lm.config.schema import schema
from lm.cost import flops
from lm.cost.devices import peak_flops


def model(**keys):
    return parameters.resolve(Config(model=ModelConfig(**keys)), vocab_size=2).model


GPT2_SMALL = model(d_model=768, n_layers=12, n_heads=12, ffn="mlp", d_ff=3072, vocab_size=50257)
LLAMA_32_1B = model(
    d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn="glu", d_ff=8192, vocab_size=128256
)


def test_weights_of_published_models():
    # 124,439,808 parameters, minus the 1024 learned positions, the biases (2304 + 768 + 3072 + 768
    # per layer) and the gains and biases of norms (4 x 768 per layer, 2 x 768 at the end). The tied
    # head counts once.
    biases_and_norms = 12 * (2304 + 768 + 3072 + 768 + 4 * 768) + 2 * 768
    assert (
        flops.matmul_params(GPT2_SMALL)
        == 124_439_808 - 1024 * 768 - biases_and_norms
        == 123_532_032
    )
    # Llama 3.2 1B: 1,235,814,400 parameters, minus two gains per layer and the final one.
    assert flops.matmul_params(LLAMA_32_1B) == 1_235_814_400 - (2 * 16 + 1) * 2048


def test_flops_of_gpt2_small_by_hand():
    # 6 x 123,532,032 = 741,192,192; attention 12 x 12 layers x 768 x keys, with 512.5 keys, or 1024
    # as in PaLM.
    assert flops.flops_per_token(GPT2_SMALL, 1024) == 741_192_192 + 56_678_400
    assert flops.flops_per_token(GPT2_SMALL, 1024, full_square=True) == 741_192_192 + 113_246_208


@pytest.mark.parametrize("window", [0, 1, 2, 5, 7, 8, 100])
@pytest.mark.parametrize("seq_len", [1, 7, 8])
def test_mean_attended_keys_counts_the_mask(seq_len, window):
    t, s = np.arange(seq_len)[:, None], np.arange(seq_len)[None, :]
    mask = (s <= t) & ((t - s < window) if window else True)
    assert flops.mean_attended_keys(seq_len, window) == pytest.approx(
        mask.sum() / seq_len, rel=1e-15
    )


def test_windows_repeat_over_the_layers():
    c = model(
        d_model=8,
        n_layers=5,
        n_heads=2,
        ffn="mlp",
        d_ff=16,
        vocab_size=10,
        window_pattern=(4, 4, 0),
    )
    # T = 8: (1 + 2 + 3 + 5 x 4) / 8 = 3.25 keys in a window of 4, 4.5 without one.
    attention = flops.flops_per_token(c, 8) - 6 * flops.matmul_params(c)
    assert attention == 12 * 8 * (4 * 3.25 + 4.5)


def test_mfu():
    # PaLM 540B (Chowdhery et al. 2022, section 4.1): 238.3 thousand tokens/s on 6144 TPU v4 chips,
    # 46.2 % MFU with attention (118 layers, 48 heads of 256, T = 2048).
    per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    peak = peak_flops("TPU v4", "bfloat16")
    assert flops.mfu(238.3e3, per_token, 6144, peak) == pytest.approx(0.462, abs=0.001)
    assert flops.mfu(238.3e3, per_token, 6144, None) is None


# ---- FLOPs against the products in the traced program --------------------------------------------

SMALL = {"d_model": 32, "d_ff": 96, "d_head": 8, "vocab_size": 64, "attention": "einsum"}
ARCHITECTURES = [
    {key: choice}
    for key in ("norm", "norm_placement", "ffn", "positions", "qk_norm_over")
    for choice in schema()[f"model.{key}"][1].metadata["choices"]
]
ARCHITECTURES += [
    {key: True}
    for key in ("ffn_bias", "attn_bias", "head_bias", "qk_norm", "tie_embeddings", "scan_layers")
]
ARCHITECTURES += [{"n_kv_heads": 2}, {"attn_softcap": 5.0}, {"n_layers": 5, "scan_layers": True}]


@pytest.mark.parametrize("keys", ARCHITECTURES, ids=str)
def test_the_count_is_that_of_the_traced_program(keys):
    """The table's count is that of the products in the traced forward pass, for each value of an
    architecture key.
    """
    c, B, T = tiny(model=SMALL | keys).model, 2, 16
    # the backward pass takes twice the forward
    counted = flops.flops_per_token(c, T, full_square=True) / 3 * B * T
    assert forward_flops(c, B, T) == pytest.approx(counted, rel=0.01)
