"""The faults of faults.toml, and the controls."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """A patch of one file of `lm`; controls have none."""

    name: str  # what is wrong
    kind: str
    keys: str = ""  # of config, in which the code runs, such as "model.attn_gate=head"
    file: str = ""
    old: str = ""  # occurs once in the file
    new: str = ""


# Words of the properties that are tried first, for speed; then all are.
HINTS = {
    "mask": "looks back,plain Transformer,layers see,kernels",
    "document": "looks back,packed,several chunks",
    "cache": "cached",
    "position": "plain Transformer,shifted,packed,cached",
    "norm": "looks back,plain Transformer,no order,independent,ln V",
    "residual": "leave the stream,plain Transformer,step 0,carried",
    "heads": "no order,independent,plain Transformer",
    "scale": "plain Transformer,ln V,width,depth",
    "dropout": "dropout",
    "loss": "plain Transformer,packed doc,micro-batches",
    "16 bits": "wide",
    "gradient": "gradients,kernels",
    "unread": "reads,are on",
    "FLOPs": "FLOPs",
    "plan": "plan's",
    "layers": "scanned,reads",
    "devices": "devices",
    "step 0": "step 0",
    "resume": "resumes",
    "export": "export",
    "together": "looks back,packed,cached,beside",
}


def _faults() -> list[Fault]:
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    kinds = tomllib.loads(text)
    return [Fault(kind=kind, **row) for kind, rows in kinds.items() for row in rows]


FAULTS = _faults()

# Without a patch: nothing may be accused.
ON = (
    "",
    "model.norm=layer model.ffn=mlp model.attn_bias=true model.ffn_bias=true "
    "model.positions=learned model.tie_embeddings=true",
    "model.norm=dyt model.norm_placement=sandwich model.qk_norm=true",
    "model.positions=sinusoidal model.norm_placement=post model.init=gpt2",
    "model.attn_gate=head",
    "model.attn_gate=element_identity",
    "model.attn_exclusive=full",
    "model.attn_exclusive=learned",
    "model.attn_sink=true",
    "model.attn_forget=true model.positions=none",
    "model.gated_delta=all",
    "model.gated_delta=three_of_four",
    "model.attn_differential=true",
    "model.query_scale=learned",
    "model.query_scale=log_n",
    "model.value_embeddings=true",
    "model.value_residual=half",
    "model.value_residual=learned",
    "model.residual_scalars=true",
    "model.residual=depth_attention",
    "model.residual=hyper_connections",
    "model.residual=parallel",
    "model.conv_keys=true",
    "model.conv_values=true",
    "model.conv_stream=true",
    "model.token_shift=true",
    "model.multi_token_prediction=true",
    "model.deep_supervision=0.3",
    "model.masked_diffusion=true",
    "model.mixers=(kda,)",
    "model.loops=2 model.loop_input=mix",
    "model.loops=2 model.loop_input=add",
    "model.mixers=(latent,)",
    "model.mixers=(talking_heads,) model.n_kv_heads=2",
    "model.mixers=(rg_lru,)",
    "model.mixers=(rg_lru,rg_lru,attention)",
    "model.ffn=moe",
    "model.ffn=moe model.moe_first_layer=1 model.shared_expert=true",
    "model.branches=(ffn*0.5,attention,ffn*0.5)",
    "model.loops=2 model.loop_layers=(1,3) model.dropout=0.2",
    "model.window_pattern=(0,64) model.rope_window_theta=50 model.rope_pattern=(1,0) model.n_kv_heads=2",
    "model.parametrization=mup",
    "train.z_loss=0.1 train.loss_chunk=8",
)
CONTROLS = [Fault(f"control: {keys or 'plain'}", "control", keys) for keys in ON]
