"""GPT-2 small (124,439,808 parameters) on OpenWebText, with the batch and schedule of nanoGPT's
reproduction.

Run nanoGPT's data/openwebtext/prepare.py, and put its train.bin and val.bin into data/openwebtext:

    python -m lm.train --config configs/gpt2_124m.py

Cost: GPUs with 40 GiB, one or many (each takes its share of the batch). Never run here.
Result to compare with: nanoGPT's README reports a loss of about 2.85 after 4 days on 8 A100s.
"""

from lm.config import default_config


def get_config():
    config = default_config()
    config.name = "gpt2_124m"
    config.data.source = "tokens:data/openwebtext"
    config.data.tokenizer = "none"
    config.model.vocab_size = 50_257
    config.model.d_model = 768
    config.model.n_layers = 12
    config.model.n_heads = 12
    config.model.norm = "layer"
    config.model.ffn = "mlp"
    config.model.activation = "gelu_tanh"
    config.model.ffn_bias = config.model.attn_bias = True
    config.model.positions = "learned"
    config.model.tie_embeddings = True
    config.model.init = "gpt2"
    config.model.compute_dtype = "bfloat16"
    config.model.scan_layers = True
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 2000
    config.train.steps = 600_000
    config.train.batch_size = 480
    config.train.micro_batch_size = 12
    config.train.seq_len = 1024
    config.train.loss_chunk = 4096
    config.eval.every = 1000
    config.eval.max_batches = 20
    config.eval.final_splits = ("validation",)
    return config
