"""Write code_export.json beside this file: logits that the exported code computes in PyTorch.

For each model of tests/models_with_code.py it has the logits after a text, and the digest of the
modelling file that computed them. Run it by hand when lm/huggingface/modeling.py changes, with
torch, transformers and the packages of the tests installed:

    python tests/references/make_code_export.py
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from models_with_code import MODELS  # noqa: E402
from tiny import redrawn, tiny  # noqa: E402

from lm.huggingface import code_export  # noqa: E402
from lm.huggingface.writing import write_checkpoint  # noqa: E402

IDS = np.random.default_rng(0).integers(0, 19, (1, 8))


def logits(directory: str) -> list[float]:
    """Return those after the last token, with six digits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        last_V = model.eval()(torch.tensor(IDS)).logits[0, -1]
    return [float(f"{x:.6g}") for x in last_V.tolist()]


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    stored = {}
    for name, keys in MODELS.items():
        config = tiny(model=keys)
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(Path(directory), config, redrawn(config.model), code=True)
            code = (Path(directory) / code_export.FILE).read_bytes()
            digest = hashlib.sha256(code).hexdigest()[:16]
            stored[name] = {"code": digest, "logits": logits(directory)}
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in stored.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (FOLDER / "code_export.json").write_text(text)


if __name__ == "__main__":
    main()
