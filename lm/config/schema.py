"""The schema: one frozen dataclass per section, and in it every key with its type, default, range
and meaning.

A config file starts from `default_config()` and states what differs. All other code reads the
frozen `Config`. `--help` and docs/configuration.md are generated from here. This module imports no
jax: a misspelled key must not cost two seconds.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

MESH_AXES = ("replica", "fsdp", "tensor", "sequence")
SPLITS = ("train", "validation", "test")
SOURCES = ("tfds:NAME", "text:PATH", "jsonl:PATH", "csv:PATH", "parquet:PATH", "arrow:PATH", "hf:DIR", "tokens:PATH",
           "python_docs", "markov", "markov:ORDER")  # fmt: skip
PLATFORMS = ("cpu", "gpu", "tpu")
MAX_SAMPLE = 1_000_000  # tokens; each one takes a forward pass


def key(
    default, doc, *, only=None, low=None, above=None, high=None, below=None, choices=None, forms=None, path=False,
    execution=False, whole=(), recurrent=(), attention=None, read_by=(),
):  # fmt: skip
    """Declare a config key.

    Args:
        default: the value if neither the file nor the command line sets it.
        doc: the meaning, for --help and docs/configuration.md.
        only: the values of another key of the section with which this one has an effect, such as
            "norm=layer", "tokenizer=bpe,hf" or "name!=sgd". The meaning begins with them; `unused`
            in lm/config/checks.py finds keys without effect.
        low, above, high, below: the range: low <= value <= high and above < value < below.
        choices: the allowed strings.
        forms: the allowed strings with an argument, such as "bpe:SIZE" or "text:PATH".
        path: True if the value, or its argument, is a path, in which "~" is the home directory.
        execution: True if the key changes how a run is carried out, but not what it computes
            (beyond rounding). Such a key may change when a run is resumed, and is left out of the
            digest that identifies an experiment.
        whole: the values that need whole sequences on a device.
        recurrent: the values with which positions see earlier ones by a recurrence.
        attention: "scores" if the key changes attention scores, "replaced" if it puts another layer
            in the place of attention.
        read_by: the mixers, or "ffn", that read the key. It has no effect in a model with none of
            them. (): all models read it.
    """
    if default == ():
        raise ValueError(
            f"key: {doc!r} has the default (), but a tuple has at least one value; use None"
        )
    if only:
        name, sign, values = re.split("(!?=)", only)
        only = (name, sign == "=", values.split(","))
        names = values.replace(",", ", ")
        if is_off := values in ("none", "false", "0", "0.0"):
            names = name
        doc = f"{'' if is_off == (sign == '!=') else 'not '}{names}: {doc}"
    limits = {
        "low": low,
        "above": above,
        "high": high,
        "below": below,
        "choices": choices,
        "forms": forms,
    }
    others = {
        "doc": doc,
        "only": only,
        "execution": execution,
        "path": path,
        "whole": whole,
        "recurrent": recurrent,
        "attention": attention,
        "read_by": read_by,
    }
    return dataclasses.field(default=default, metadata=others | limits)


# What reads a key, see `key`.
ATTENTION = ("attention",)
HEADS = (*ATTENTION, "talking_heads")  # of queries, keys and values
KEYS = (*HEADS, "latent")  # with keys at positions
FFN = ("ffn",)

# A table: each key begins with its default and its meaning.
# fmt: off


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The Transformer: sizes, layers, initial values and how they are computed."""

    d_model: int = key(256, "width of the residual stream", low=1)
    n_layers: int = key(4, "number of blocks", low=1)
    n_heads: int = key(4, "number of query heads", low=1)
    n_kv_heads: int | None = key(None, "number of key/value heads (grouped-query attention); none: n_heads", low=1,
        read_by=HEADS)
    d_head: int | None = key(None, "width of a head; none: d_model / n_heads", low=1)
    vocab_size: int | None = key(None, "size of the vocabulary; none: the tokenizer's", low=2)
    norm: str = key("rms", "normalization by RMSNorm, LayerNorm or DyT", only="norm_placement!=none",
        choices=("rms", "layer", "dyt"))
    norm_eps: float = key(1e-5, "epsilon added to the variance or mean square before the root", above=0.0)
    norm_bias: bool = key(True, "add a bias (RMSNorm never has one)", only="norm=layer")
    norm_algorithm: str = key("two_pass", "algorithm that computes the variance", only="norm=layer",
        choices=("two_pass", "welford", "chan", "running_mean"))
    norm_ddof: int = key(0, "divide the sum of squares by d_model - norm_ddof", only="norm=layer", low=0, high=1)
    norm_placement: str = key("pre", "position of the norms in a block (output: x + norm(f(x)), as in OLMo 2)",
        choices=("pre", "post", "sandwich", "output", "parallel", "none"))
    ffn: str = key("glu", "feed-forward layer: two matrices, gated with three, or gated experts",
        choices=("mlp", "glu", "moe"), whole=("moe",), read_by=FFN)
    activation: str = key("silu", "activation of the feed-forward layer",
        choices=("relu", "silu", "gelu", "gelu_tanh", "relu_squared", "sigmoid"), read_by=FFN)
    d_ff: int | None = key(None, "width of the feed-forward layer; none: 4 d_model (mlp), 8/3 d_model rounded to a "
        "multiple of 64 (glu)", low=1, read_by=FFN)
    n_experts: int = key(8, "number of experts, each of width d_ff", only="ffn=moe", low=2)
    experts_per_token: int = key(2, "number of experts that a token uses", only="ffn=moe", low=1)
    normalize_experts: bool = key(True, "divide the weights of a token's experts by their sum", only="ffn=moe")
    shared_expert: bool = key(False, "one more expert that every token uses", only="ffn=moe")
    moe_first_layer: int = key(0, "first layer with experts; earlier ones are glu", only="ffn=moe", low=0)
    moe_balance: float = key(0.01, "weight of the balance of experts in the loss", only="ffn=moe", low=0.0)
    router_z: float = key(0.001, "weight of the router's log(Z)^2 in the loss", only="ffn=moe", low=0.0)
    ffn_bias: bool = key(False, "add biases in the feed-forward layer", read_by=FFN)
    attn_bias: bool = key(False, "add biases to the query, key and value projections", read_by=ATTENTION)
    attn_out_bias: bool | None = key(None, "add a bias to the output projection of attention; none: the value of "
        "attn_bias (Qwen2: false, with attn_bias)", read_by=ATTENTION)
    head_bias: bool = key(False, "add a bias to the output head")
    positions: str = key("rope", "position encoding", choices=("rope", "sinusoidal", "learned", "none"))
    rope_theta: float = key(10_000.0, "base of the wavelengths", only="positions=rope", above=0.0, read_by=KEYS)
    rope_window_theta: float | None = key(None, "base in layers with a window, without rope_scaling (Gemma 3, OLMo 3); "
        "none: as in the others", only="positions=rope", above=0.0, read_by=HEADS)
    rope_pairing: str = key("adjacent", "which features are rotated together", only="positions=rope",
        choices=("adjacent", "halves"), read_by=KEYS)
    rope_pattern: tuple[int, ...] = key((1,), "layers that rotate queries and keys (1) and layers that do not (0), "
        "repeated over the depth", only="positions=rope", low=0, high=1, read_by=HEADS)
    rope_width: int | None = key(None, "number of the first features of a head that are rotated; none: d_head",
        only="positions=rope", low=2, read_by=HEADS)
    rope_scaling: str = key("none", "change the frequencies for a longer context. linear: divide all by rope_factor; "
        "llama3: divide the low ones (Llama 3.1); yarn: divide the low ones and scale queries and keys (YaRN); "
        "dynamic: raise the base with max_positions", only="positions=rope",
        choices=("none", "linear", "llama3", "yarn", "dynamic"), read_by=HEADS)
    rope_factor: float = key(1.0, "divisor of the frequencies", only="rope_scaling!=none", low=1.0)
    rope_low_freq_factor: float = key(1.0, "frequencies of less than this many turns in rope_original_max_positions "
        "are divided", only="rope_scaling=llama3", above=0.0)
    rope_high_freq_factor: float = key(4.0, "frequencies of more than this many turns in rope_original_max_positions "
        "do not change", only="rope_scaling=llama3", above=0.0)
    rope_beta_fast: float = key(32.0, "pairs of more than this many turns in rope_original_max_positions do not change",
        only="rope_scaling=yarn", above=0.0)
    rope_beta_slow: float = key(1.0, "pairs of less than this many turns in rope_original_max_positions are divided",
        only="rope_scaling=yarn", above=0.0)
    rope_amplitude: float | None = key(None, "factor of rotated queries and keys; none: 0.1 ln(rope_factor) + 1",
        only="rope_scaling=yarn", above=0.0)
    rope_original_max_positions: int = key(8192, "context length before the change",
        only="rope_scaling=llama3,yarn,dynamic", low=1)
    sinusoidal_order: str = key("sine_first", "order of the features in each pair", only="positions=sinusoidal",
        choices=("sine_first", "cosine_first"))
    max_positions: int | None = key(None, "rows of the table of learned positions, to train longer sequences from it "
        "later; context length with rope_scaling = dynamic; none: train.seq_len", low=1)
    qk_norm: bool = key(False, "apply RMSNorm to queries and keys, before RoPE", read_by=ATTENTION)
    qk_norm_over: str = key("head", "features normalized together: those of a head (Qwen 3), or of all heads (OLMo 2)",
        only="qk_norm!=false", choices=("head", "all_heads"))
    attn_gate: str = key("none", "gate of attention's output for each head or each feature (element): sigmoid(x W), or "
        "2 sigmoid(x W) from W = 0 (identity)",
        choices=("none", "head", "element", "head_identity", "element_identity"), read_by=ATTENTION)
    attn_exclusive: str = key("none", "remove from attention's output its part along the token's own value: all of it, "
        "or a learned part from 0", choices=("none", "full", "learned"), read_by=ATTENTION)
    attn_sink: bool = key(False, "add one key with a learned score and the value 0 to each head", attention="scores",
        read_by=ATTENTION)
    attn_forget: bool = key(False, "a forget gate for each head and token; mostly with positions = none",
        recurrent=(True,), attention="scores", read_by=ATTENTION)
    query_scale: str = key("none", "a learned factor of each head's queries, from 1; log_n: times the logarithm of the "
        "position, 1 at the end of the context", choices=("none", "learned", "log_n"), attention="scores",
        read_by=ATTENTION)
    attn_differential: bool = key(False, "each head is the difference of two heads with the same keys and values",
        attention="scores", read_by=ATTENTION)
    gated_delta: str = key("none", "Gated DeltaNet in place of attention, in all layers or in three of four",
        choices=("none", "all", "three_of_four"), recurrent=("all", "three_of_four"), attention="replaced",
        read_by=ATTENTION)
    value_embeddings: bool = key(False, "add an embedding of the token to the values in every second layer",
        read_by=ATTENTION)
    value_residual: str = key("none", "add the values of the first layer to those of each layer: half of each, or a "
        "learned part from 0", choices=("none", "half", "learned"), read_by=ATTENTION)
    residual: str = key("sum", "how branches read the residual stream and add to it: the plain sum, attention over the "
        "outputs of all earlier branches, four streams with learned mappings, or the sum of parallel branches: the "
        "feed-forward layer reads what attention reads (GPT-NeoX)",
        choices=("sum", "depth_attention", "hyper_connections", "parallel"))
    residual_multiplier: float = key(1.0, "factor of what each branch adds: x + m f(norm x), as in Granite", above=0.0)
    residual_scalars: bool = key(False, "x <- a x + b (embeddings) before each layer, a = 1 and b = 0 at first")
    conv_keys: bool = key(False, "add a causal convolution over 4 positions to the keys, from 0", recurrent=(True,),
        read_by=ATTENTION)
    conv_values: bool = key(False, "add such a convolution to the values", recurrent=(True,), read_by=ATTENTION)
    conv_stream: bool = key(False, "add such a convolution to the residual stream before each layer", recurrent=(True,))
    token_shift: bool = key(False, "add a gated part of the previous token's embedding, from 0", recurrent=(True,))
    multi_token_prediction: bool = key(False, "also predict the second and third next token, with weights 1/2 and 1/4 "
        "that fall to 0")
    mixers: tuple[str, ...] = key(("attention",), "what lets positions see each other in each layer, repeated over the "
        "depth: attention, latent attention (DeepSeek-V2), talking heads, the recurrence of Griffin, or Kimi delta "
        "attention", choices=("attention", "latent", "talking_heads", "rg_lru", "kda"), recurrent=("rg_lru", "kda"))
    latent_width: int | None = key(None, "width of the vector that a cache keeps of a token; none: 4 d_head",
        only="mixers=latent", low=1)
    branches: tuple[str, ...] = key(("attention", "ffn"), "branches of a block in this order, with a factor, if any; "
        "attention stands for the mixer of the layer (macaron: ffn*0.5, attention, ffn*0.5)")
    loops: int = key(1, "how often the looped layers are applied, with the same parameters", low=1)
    loop_layers: tuple[int, ...] | None = key(None, "the looped layers, (first, end); none: all", only="loops!=1",
        low=0)
    loop_input: str = key("none", "what later turns read besides the stream: the input of the looped layers, added "
        "or in a learned mix", only="loops!=1", choices=("none", "add", "mix"))
    deep_supervision: float | None = key(None, "weight in the loss of the logits of the stream at half of the depth",
        above=0.0)
    masked_diffusion: bool = key(False, "hide random tokens and predict them from those before and after, as in LLaDA "
        "and MDLM; losses are bounds")
    window_pattern: tuple[int, ...] = key((0,), "sliding-window attention: keys a query sees (including itself) in "
        "each layer, repeated over the depth; 0: all", low=0, attention="scores", read_by=KEYS)
    attn_scale: float | None = key(None, "factor of attention scores, query_pre_attn_scalar^-0.5 in Gemma 2; none: 1 / "
        "sqrt(d_head)", above=0.0, attention="scores", read_by=ATTENTION)
    attn_softcap: float | None = key(None, "cap attention scores: c tanh(scores / c), as in Gemma 2", above=0.0,
        attention="scores", read_by=ATTENTION)
    logit_softcap: float | None = key(None, "cap logits: c tanh(logits / c), as in Gemma 2", above=0.0)
    round_logits: bool = key(False, "round logits to bfloat16, as PyTorch's autocast does, which halves their bytes; "
        "the loss is computed in float32", only="compute_dtype=bfloat16")
    logit_divisor: float = key(1.0, "divide the last hidden states, and so the logits, by this (Granite)", above=0.0)
    embed_scale: float = key(1.0, "factor of token embeddings, rounded to compute_dtype; sqrt(d_model) in Gemma",
        above=0.0)
    tie_embeddings: bool = key(False, "use the embedding table as the output head")
    dropout: float = key(0.0, "dropout rate on the embeddings and each residual branch", low=0.0, below=1.0)
    init: str = key("glorot", "initial weights. glorot: N(0, 2 / (d_in + d_out)) truncated at 3 sigma; he: N(0, 2 / "
        "d_in); gpt2: N(0, 0.02^2), residual projections divided by sqrt(branches of all layers)",
        choices=("glorot", "he", "gpt2"))
    embed_std: float | None = key(None, "standard deviation of the initial embeddings; none: 0.02 (gpt2), else 1 (too "
        "large for a tied head)", above=0.0)
    init_draw: int = key(0, "which of the independent draws of initial values that each seed has (sweeps: placebos)",
        low=0)
    zero_init_residual: bool = key(False, "initialize the projections into the residual stream to zero")
    parametrization: str = key("standard", "scaling of initial values and learning rates with width; under mup (muP) "
        "the best learning rate does not depend on it", choices=("standard", "mup"))
    mup_base_d_model: int = key(64, "d_model at which both parametrizations are the same; d_ff must grow in proportion "
        "to d_model", only="parametrization=mup", low=1)
    mup_base_d_head: int = key(16, "d_head at which both are the same", only="parametrization=mup", low=1)
    param_dtype: str = key("float32", "dtype of parameters and optimizer state", choices=("float32", "bfloat16"))
    compute_dtype: str = key("float32", "dtype of activations and matrix products", choices=("float32", "bfloat16"))
    scan_layers: bool = key(False, "compile one block and scan it over the depth: compiles faster, runs slower on CPU",
        execution=True)
    attention: str = key("auto", "implementation of attention",
        choices=("auto", "einsum", "chunked", "xla", "cudnn", "splash"), execution=True)
    remat: str = key("none", "rematerialization: recompute nothing, all but products with weights, or the whole block "
        "in the backward pass", choices=("none", "dots", "block"), execution=True)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text, the tokenizer, and how tokens become training sequences."""

    source: str = key("tfds:tiny_shakespeare", "the corpus (a prepared TFDS data set, a file or a folder of text, JSON "
        "Lines, CSV, Parquet or Arrow, a data set of Hugging Face, a folder of token shards, Python's own "
        "documentation, or synthetic text of known entropy)", only="mixture=none", forms=SOURCES, path=True)
    field: str = key("text", "the field or column with the text, or with chats: lists of turns",
        only="source=jsonl,csv,parquet,arrow,hf")
    targets: str = key("all", "the tokens that are trained on and evaluated, of chats and labeled parts: all, or "
        "answers alone", only="source=jsonl,parquet,arrow,hf,tokens", choices=("all", "assistant"))
    data_dir: str | None = key(None, "folder of prepared TFDS data sets; none: TFDS_DATA_DIR, else TFDS's default",
        execution=True, path=True)
    offline: str | None = key(None, "fall back to this corpus, with a warning, if the source cannot be downloaded; "
        "none: fail", only="mixture=none", choices=("python_docs",), execution=True)
    tokenizer: str = key("char", "characters, bytes, words, a byte-level BPE of SIZE tokens trained on the text, or a "
        "Hugging Face tokenizer.json; none: the source holds token ids",
        forms=("char", "byte", "word", "bpe:SIZE", "hf:PATH", "none"), path=True)
    special_tokens: bool = key(False, "encode the names of special tokens in documents and prompts, such as "
        "<|endoftext|>, as these tokens, and put the tokenizer's first token (<s>) before each; false: encode the "
        "names as text, for untrusted text", only="tokenizer=bpe,hf")
    unk: bool = key(False, "replace what is not in the vocabulary by <unk>; false: fail", only="tokenizer=char,word")
    splits: tuple[float, ...] | None = key(None, "fractions (train, validation, test) of the text, in this order; "
        "none: the source's own splits", low=0.0, high=1.0)
    mixture: tuple[tuple[str, str, float], ...] | None = key(None, "sources that are mixed in place of data.source: "
        "(name, source, weight by token) of each, with order = epochs; none: data.source alone")
    mixture_temperature: float = key(1.0, "weights are raised to 1 / temperature", only="mixture!=none", above=0.0)
    mixture_stages: tuple[tuple[float, ...], ...] | None = key(None, "later weights, (first step, weight of each "
        "source) of each stage; none: the weights do not change", only="mixture!=none")
    max_epochs: tuple[float, ...] | None = key(None, "maximum epochs of each source, or one number for all; afterwards "
        "the others share its weight; none: no limit", only="mixture!=none", above=0.0)
    order: str = key("crops", "training sequences: independent random windows, or every window once per epoch",
        choices=("crops", "epochs"))
    shuffle: bool = key(True, "visit the windows in random order", only="order=epochs")
    stride: int | None = key(None, "distance between the starts of two windows; none: train.seq_len",
        only="order=epochs", low=1)
    packing: str = key("none", "documents: pack whole documents into rows, and attend within a document only",
        choices=("none", "documents"))
    cache_dir: str | None = key(None, "folder for tokens, tokenizers and compiled programs; none: the user's cache "
        "folder", execution=True, path=True)
    device_bytes: int = key(2**29, "keep a corpus of up to this many bytes in device memory", low=0, high=2**63 - 1,
        execution=True)

    def of_source(self, source: str) -> "DataConfig":
        """Return these keys for a source alone, without a mixture and without a fallback."""
        alone: dict[str, Any] = {"source": source, "offline": None, "mixture": None, "mixture_stages": None}
        return dataclasses.replace(self, **alone, max_epochs=None)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule, the learning-rate schedule, weight decay and clipping."""

    name: str = key("adamw", "update rule; muon, normuon, muonh (Muon on a sphere) and soap update matrices between "
        "features, and adamw all else",
        choices=("adamw", "sgd", "lion", "muon", "normuon", "muonh", "soap", "schedule_free", "ademamix"))
    learning_rate: float = key(1e-3, "peak learning rate", above=0.0)
    schedule: str = key("cosine", "course of the learning rate after the warm-up (wsd: warm-up, stable, decay)",
        choices=("constant", "linear", "cosine", "wsd"))
    warmup_steps: int = key(0, "steps of linear warm-up; shortened, with a note, if train.steps on the command line "
        "leaves no room", low=0)
    decay_steps: int | None = key(None, "step at which the decay ends; none: train.steps. With a number, a finished "
        "run may be resumed with more steps", only="schedule!=constant", low=1)
    decay_fraction: float = key(0.2, "fraction of decay_steps that decays", only="schedule=wsd", above=0.0, high=1.0)
    final_fraction: float = key(0.1, "final learning rate / peak learning rate", only="schedule=linear,cosine,wsd",
        low=0.0, high=1.0)
    b1: float = key(0.9, "decay rate of the first moment; lion: weight of the momentum in an update; schedule_free: "
        "weight of the average where gradients are taken", only="name!=sgd", low=0.0, below=1.0)
    b2: float = key(0.95, ("decay rate of the second moment; soap: of its statistics, too; lion: "
                          "of the momentum"),
        only="name!=sgd", low=0.0, below=1.0)
    b3: float = key(0.9999, "decay rate of the slow average of gradients", only="name=ademamix", above=0.0, below=1.0)
    slow_weight: float = key(5.0, "weight of the slow average in an update", only="name=ademamix", low=0.0)
    slow_warmup_steps: int | None = key(None, "steps in which this weight and the half-life of the slow average grow; "
        "none: train.steps. With a number, a run may be resumed with more steps", only="name=ademamix", low=1)
    eps: float = key(1e-8, "epsilon added to the denominator", only="name!=sgd,lion", above=0.0)
    momentum: float = key(0.0, "decay rate of the momentum; 0: no momentum", only="name=sgd", low=0.0, below=1.0)
    nesterov: bool = key(True, "use Nesterov momentum", only="name=sgd,muon,muonh")
    muon_beta: float = key(0.95, "decay rate of the momentum", only="name=muon,normuon,muonh", low=0.0, below=1.0)
    soap_every: int = key(10, "steps between two updates of the eigenvectors", only="name=soap", low=1)
    adam_learning_rate: float | None = key(None, "peak learning rate of embeddings, head, gains and biases, which "
        "adamw updates; none: learning_rate", only="name=muon,normuon,muonh,soap", above=0.0)
    weight_decay: float = key(0.1, "decoupled weight decay, multiplied by the scheduled learning_rate, even where "
        "adam_learning_rate is the rate; muonh: not of matrices on a sphere", low=0.0)
    cautious_decay: bool = key(False, "decay only weights that the update does not enlarge", only="weight_decay!=0.0")
    decay_norms: bool = key(False, "decay the gains of norms, too", only="weight_decay!=0.0")
    decay_biases: bool = key(False, "decay biases, too", only="weight_decay!=0.0")
    decay_embeddings: bool = key(False, "decay token and position embeddings, too", only="weight_decay!=0.0")
    clip_norm: float | None = key(1.0, "clip gradients to this global norm; none: do not clip", above=0.0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The length and size of training, and how steps are executed."""

    steps: int = key(1000, "optimizer steps; 0: evaluate only, with init_from for example", low=0)
    batch_size: int = key(32, "sequences per step, over all devices", low=1)
    seq_len: int = key(256, "tokens per sequence", low=1)
    seed: int = key(0, "seed of initial values, data order and dropout", low=0, high=2**32 - 1)
    ema: float | None = key(None, "decay of an average of the parameters by step (0.999, for example), which is "
        "evaluated beside them; none: no average", above=0.0, below=1.0)
    z_loss: float = key(0.0, ("weight of the squared log-partition function in the loss, as "
                             "in PaLM"), low=0.0)
    label_smoothing: float = key(0.0, "train on targets with the probability 1 - s, and s spread over all ids; the "
        "logged loss is without it", low=0.0, below=1.0)
    micro_batch_size: int | None = key(None, "sequences per device at once, at most; gradients are summed over the "
        "micro-batches of a step; none: all", low=1, execution=True)
    steps_per_dispatch: int | None = key(None, "steps per call of the compiled program; none: 1 to 10, as many as take "
        "half a second on a CPU core", low=1, execution=True)
    loss_chunk: int = key(0, "compute the loss for this many tokens of a device at a time, to save memory of logits; "
        "0: all at once", low=0, execution=True)
    on_nonfinite: str = key("stop", "at a loss or gradient that is not finite: stop the run, or skip the update",
        choices=("stop", "skip"), execution=True)
    on_spike: str = key("none", "at a spike of the loss or gradient norm, 6 robust standard deviations above the "
        "median of the last 128 steps: do nothing, log it with its text's place, or also skip the update",
        choices=("none", "warn", "skip"), execution=True)
    deterministic: bool = key(False, "GPU: use slower kernels that add in a fixed order", execution=True)
    profile: tuple[int, ...] | None = key(None, "(first, last) step of a profile (xprof trace), written to the workdir",
        low=1, execution=True)
    debug: bool = key(False, "run without jit, for print() and a debugger", execution=True)
    compiler_options: tuple[str, ...] | None = key(None, "options of XLA for the training step, NAME=VALUE, added to "
        "those of the platform (lm/kernels/platform.py) or in their place", execution=True)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices divide the work. At most one axis may be -1: all remaining devices."""

    replica: int = key(-1, ("data parallelism: copies of the model, each with its share of "
                           "the batch"), low=-1,
        execution=True)
    fsdp: int = key(1, "devices that share parameters, optimizer state and batch (FSDP)", low=-1, execution=True)
    tensor: int = key(1, ("tensor parallelism: devices that share heads, features and "
                         "vocabulary"), low=-1,
        execution=True)
    sequence: int = key(1, ("sequence parallelism: devices that share the positions of a "
                           "sequence"), low=-1,
        execution=True)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Evaluation during and after training, and the sample at the end."""

    every: int = key(0, ("steps between evaluations of the validation split; 0: only at the "
                        "end"), low=0, execution=True)
    patience: int = key(0, ("stop after this many evaluations without a new smallest "
                           "validation loss; 0: never"), low=0,
        execution=True)
    max_batches: int = key(0, "batches per evaluation during training; 0: the full split", only="every!=0", low=0,
        execution=True)
    batch_size: int | None = key(None, "sequences per batch; none: train.batch_size", low=1, execution=True)
    probes: tuple[str, ...] | None = key(None, "generated sequences whose loss is evaluated, too: a repeated random "
        "sequence, values of keys; none: no probes", choices=("repeat", "recall"), execution=True)
    harness_every: int = key(0, "steps between scores on harness_tasks, which are also computed at the end (needs the "
        "extra [eval]); 0: never", low=0, execution=True)
    harness_tasks: tuple[str, ...] | None = key(None, "tasks of lm-evaluation-harness, by name or YAML file "
        "(a program: use only those that you trust)", execution=True)
    harness_limit: int = key(0, "first examples of each task to use; 0: all", only="harness_tasks!=none", low=0,
        execution=True)
    final_splits: tuple[str, ...] = key(("validation", "test"), "splits evaluated in full at the end; a+b: the mean "
        "over both", execution=True)
    sample_tokens: int = key(300, "length of the sample written at the end; 0: no sample", low=0, high=MAX_SAMPLE,
        execution=True)
    sample_prompt: str = key("\n", "prompt of the sample", execution=True)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how much to keep."""

    every: int = key(1000, ("steps between checkpoints, besides the one at the end; 0: only "
                           "at the end"), low=0,
        execution=True)
    keep: int = key(2, ("number of newest checkpoints to keep, besides the best by validation "
                       "loss"), low=1,
        execution=True)


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """What is logged, how often and where."""

    every: int = key(10, ("steps between metrics; reduced where the command line sets a "
                         "smaller train.steps"), low=1,
        execution=True)
    detail_every: int = key(0, "steps between diagnostics by layer: attention, and RMS of activations, gradients, "
        "parameters and updates; 0: never", low=0, execution=True)
    tensorboard: bool = key(True, "write TensorBoard events", execution=True)
    wandb: bool = key(False, ("log to Weights & Biases, to the project WANDB_PROJECT (needs the "
                             "extra [wandb])"),
        execution=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """The name of an experiment, and what it starts from."""

    name: str = key("run", "start of the name of the run's directory", execution=True)
    notes: str = key("", "hint for the user of this config, printed at the end; not with overrides of keys without a "
        "star", execution=True)
    init_from: str | None = key(None, "workdir of a run (its best step) or directory of a Hugging Face checkpoint "
        "whose parameters are the initial values where names, shapes and layers fit; {seed} in it stands for "
        "train.seed; none: random initial values", path=True)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)


# fmt: on


def sections() -> dict[str, Any]:
    """Return the dataclass of every section by its name."""
    return {f.name: f.type for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)}


def schema() -> dict[str, tuple[Any, dataclasses.Field]]:
    """Return every key by its dotted name, with its type and field."""
    leaves = {f.name: (f.type, f) for f in dataclasses.fields(Config) if f.name not in sections()}
    for name, section in sections().items():
        leaves |= {f"{name}.{f.name}": (f.type, f) for f in dataclasses.fields(section)}
    return leaves


def init_run(config: Config) -> str | None:
    """Return the directory that init_from names for this seed.

    >>> init_run(Config(init_from="runs/seed-{seed}", train=TrainConfig(seed=3)))
    'runs/seed-3'
    """
    return config.init_from and config.init_from.replace("{seed}", str(config.train.seed))


def layer_windows(model: ModelConfig) -> list[int]:
    """Return the attention window of each layer (0: no window): the pattern, repeated over the
    layers.

    >>> layer_windows(ModelConfig(n_layers=5, window_pattern=(128, 0)))
    [128, 0, 128, 0, 128]
    """
    return [model.window_pattern[i % len(model.window_pattern)] for i in range(model.n_layers)]


def mixer_of(model: ModelConfig, layer: int) -> str:
    """Return the mixer of a layer: that of the pattern, repeated over the layers.

    >>> mixer_of(ModelConfig(mixers=("rg_lru", "attention")), layer=3)
    'attention'
    """
    return model.mixers[layer % len(model.mixers)]


def present_mixers(model: ModelConfig) -> list[str]:
    """Return the mixers of all layers, each once. No list of layers is made: there may be 2^31."""
    return list(dict.fromkeys(model.mixers[: model.n_layers]))


class Branch(NamedTuple):
    """A branch of a block.

    Attributes:
        name: of its norms and outputs, and of its parameters if it is not a mixer.
        kind: "attention", for the mixer of the layer, or "ffn".
        factor: of its output.
        number: from 0, in the order of the computation.
    """

    name: str
    kind: str
    factor: float
    number: int


def branches_of(model: ModelConfig) -> list[Branch]:
    """Return the branches of a block.

    >>> [branch.name for branch in branches_of(ModelConfig(branches=("ffn*0.5", "attention", "ffn*0.5")))]
    ['ffn', 'attention', 'ffn_2']
    """
    found: list[Branch] = []
    for number, text in enumerate(model.branches):
        kind, _, factor = text.partition("*")  # lm/config/checks.py refuses other texts
        nth = 1 + sum(branch.kind == kind for branch in found)
        name = kind if nth == 1 else f"{kind}_{nth}"
        found.append(Branch(name, kind, float(factor or 1), number))
    return found


def n_mixing_branches(model: ModelConfig) -> int:
    """Return how many branches of a block have the mixer of the layer."""
    return sum(branch.kind == "attention" for branch in branches_of(model))


def looped_layers(model: ModelConfig) -> range:
    """Return the layers that config.model.loops repeats."""
    return range(*(model.loop_layers or (0, model.n_layers)))


def turns(model: ModelConfig) -> list[range]:
    """Return the layers of each turn, which are applied one turn after the other.

    >>> turns(ModelConfig(n_layers=4, loops=3, loop_layers=(1, 3)))
    [range(0, 3), range(1, 3), range(1, 4)]
    """
    looped = looped_layers(model)
    first = [0] + [looped.start] * (model.loops - 1)
    end = [looped.stop] * (model.loops - 1) + [model.n_layers]
    return [range(*layers) for layers in zip(first, end, strict=True)]


def applied_layers(model: ModelConfig) -> list[tuple[int, int]]:
    """Return (turn, layer) of the layers that a token passes, in this order."""
    return [(turn, layer) for turn, layers in enumerate(turns(model)) for layer in layers]


def n_applied_layers(model: ModelConfig, of: Sequence[int] | None = None) -> int:
    """Return how many layers a token passes, each as often as it is applied; `of`: of these alone.

    >>> n_applied_layers(ModelConfig(n_layers=4, loops=3, loop_layers=(1, 3)), of=(0, 1))
    4
    """
    if of is None or of == range(model.n_layers):  # without a loop: there may be too many layers
        return sum(map(len, turns(model)))
    return sum(layer in layers for layers in turns(model) for layer in of)


def width_factor(model: ModelConfig) -> float:
    """Return the ratio of the model's width to muP's base width; 1 under the standard
    parametrization.

    muP (Yang et al. 2022, arXiv:2203.03466, table 8) assumes that the widths of heads and of the
    feed-forward layer grow with d_model. Weights between hidden features keep a variance of 1/d_in.
    The variance of the head's weight does not depend on the width, but its input is divided by this
    factor. lm/optimizers.py has the learning rates.
    """
    return {"standard": 1.0, "mup": model.d_model / model.mup_base_d_model}[model.parametrization]


def query_heads(model: ModelConfig) -> int:
    """Return the number of heads of queries; differential attention subtracts pairs of them, which
    leaves n_heads.
    """
    return 2 * model.n_heads if model.attn_differential else model.n_heads
