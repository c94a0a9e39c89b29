"""Write huggingface_fields.json beside this file: which fields of config.json change what
transformers computes.

    python tests/references/make_huggingface_fields.py        needs torch and transformers; about ten minutes

For one stored checkpoint of each family, each field of the family's class, and each field that
transformers reads of any config (`getattr` in its masks and its cache, layers of different kinds),
is set to other values. The file has those with which the model loads and computes something else:
the logits after the last id, or, if only generation with a cache differs, null.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "huggingface"
KINDS = ("full_attention", "sliding_attention", "chunked_attention")
FOREIGN = {
    "is_causal": [False],
    "use_bidirectional_attention": [True],
    "sliding_window": [0, 2, 4],
    "attention_chunk_size": [2, 3],
    "layer_types": [[KINDS[0], KINDS[1]], [KINDS[1], KINDS[1]], [KINDS[2], KINDS[2]]],
    "per_layer_config": [
        {"0": {"rms_norm_eps": 0.5}},
        {"0": {"sliding_window": 2}},
        {"1": {"hidden_act": "relu"}},
    ],
    "kv_sharing_modes": [[None, "reuse"], ["reuse", "reuse"]],
    "is_encoder_decoder": [True],
    "is_decoder": [True],
    "head_dim": [2, 16],
    "rope_scaling": [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
    "rope_theta": [50.0],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 50.0}],
    "partial_rotary_factor": [0.5],
    "text_config": [{"hidden_act": "relu"}],
    "chunk_size_feed_forward": [2],
    "tie_word_embeddings": [True, False],
}
WITHOUT_EFFECT = (
    "dtype",
    "torch_dtype",
    "architectures",
    "model_type",
    "transformers_version",
    "_name_or_path",
)


def main():
    stored = json.loads((FOLDER / "expected.json").read_text())
    cases: dict = {}
    for name, case in stored.items():
        cases.setdefault(case["config"]["model_type"], name)
    found = {family: changes_of(stored[name]) for family, name in cases.items()}
    content = {"transformers": transformers.__version__, "cases": cases, "changes": found}
    path = FOLDER.with_name("huggingface_fields.json")
    path.write_text(json.dumps(content, separators=(",", ":")).replace('],["', '],\n["') + "\n")


def changes_of(case) -> list:
    """Return (field, value, logits or None) of each change that has an effect."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(FOLDER / f"{case['weights']}.safetensors", f"{folder}/model.safetensors")
        before, ids = run(folder, case["config"], case["ids"])
        fields = AutoConfig.for_model(**case["config"]).to_dict()
        tried = {
            name: other_values(value)
            for name, value in fields.items()
            if name not in WITHOUT_EFFECT
        }
        for name, values in FOREIGN.items():
            tried[name] = [
                *values,
                *(value for value in tried.get(name, []) if value not in values),
            ]
        for name, values in tried.items():
            for value in values:
                try:
                    after, other_ids = run(folder, case["config"] | {name: value}, case["ids"])
                except Exception:  # it does not load, or does not run
                    continue
                if not np.allclose(after, before, rtol=0, atol=1e-4):
                    found.append((name, value, np.round(after[-1], 5).tolist()))
                elif ids != other_ids:
                    found.append((name, value, None))
    print(
        case["config"]["model_type"], len(found), sorted({name for name, _, _ in found}), flush=True
    )
    return found


def other_values(value) -> list:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, 1, 2, value + 1]
    if isinstance(value, float):
        return [2 * value, value / 2, value + 1]
    if isinstance(value, str):
        return ["relu", "gelu"]
    return [] if value else [True, 0, 1, 2, 0.5, "relu"]


def run(folder, config, ids):
    """Return the logits of ids, without a cache, and the greedy continuation with one."""
    Path(folder, "config.json").write_text(json.dumps(config))
    options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError("the tensors are of another model")
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits[0].numpy()
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
        greedy = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, **options
        )
    return logits, getattr(greedy, "sequences", greedy)[0].tolist()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main()
