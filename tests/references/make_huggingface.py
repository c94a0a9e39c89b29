"""Write tests/references/huggingface/: tiny random checkpoints of each family, with the logits of
transformers.

    python tests/references/make_huggingface.py        needs torch and transformers

expected.json has for each case the name of the file with the weights, the config.json, the ids, the
logits after the last id and the greedy continuation. This script computes all but the first two
again, and weights that are missing. To add a case, add its weights and config: model_type, and the
fields that differ from the defaults of transformers. Weights are stored in bfloat16, logits are
computed from them in float32.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent / "huggingface"


def main():
    expected = json.loads((FOLDER / "expected.json").read_text())
    for stored in expected.values():
        config = AutoConfig.for_model(**stored["config"])
        path = FOLDER / f"{stored['weights']}.safetensors"
        if not path.exists():
            write_weights(config, path)
        model = load(config, path).eval()
        ids = np.random.default_rng(0).integers(0, 11, 9)
        tokens = torch.tensor(ids[None])
        with torch.no_grad():
            logits = model(tokens).logits[0, -1].tolist()
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            attended = torch.ones_like(tokens)  # else id 0 counts as padding
            greedy = model.generate(tokens, attention_mask=attended, max_new_tokens=6, **options)[
                0, 9:
            ].tolist()
        saved = json.loads(config.to_json_string()) | {"dtype": "float32"}
        stored |= {"config": saved, "ids": ids.tolist(), "logits": logits, "greedy": greedy}
    lines = ",\n".join(
        f"{json.dumps(case)}: {json.dumps(value)}" for case, value in expected.items()
    )
    (FOLDER / "expected.json").write_text("{\n" + lines + "\n}\n")


def write_weights(config, path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        gain = p.ndim == 1 and "bias" not in name and not config.model_type.startswith("gemma")
        torch.nn.init.normal_(p, float(gain), 0.4)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    (FOLDER / "model.safetensors").rename(path)
    path.chmod(0o644)
    for other in ("config.json", "generation_config.json"):
        (FOLDER / other).unlink()


def load(config, path):
    """Return the model that transformers loads; no tensor may be missing or left over."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        shutil.copyfile(path, f"{folder}/model.safetensors")
        options = {
            "attn_implementation": "eager",
            "dtype": torch.float32,
            "output_loading_info": True,
        }
        model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(
        report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), report
    return model


if __name__ == "__main__":
    main()
