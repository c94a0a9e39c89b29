"""The limits of an answer: the size, the text, the training tokens, and the hyperparameters that were not tuned."""

from collections.abc import Callable

# The config keys of each hyperparameter except the learning rate.
HYPERPARAMETERS = {
    "b2": ("optimizer.b2",),
    "momentum": ("optimizer.momentum", "optimizer.muon_beta"),
    "warm-up": ("optimizer.warmup_steps",),
    "decay": ("optimizer.schedule", "optimizer.decay_steps", "optimizer.decay_fraction", "optimizer.final_fraction"),
    "weight decay": ("optimizer.weight_decay",),
    "batch size": ("train.batch_size",),
}
UNUSED = {  # by config.optimizer.name; Muon and its variants use all
    **{name: {"momentum"} for name in ("adamw", "lion", "soap", "schedule_free")},
    "sgd": {"b2"},
}


def describe_scope(a: dict, b: dict, search: dict | None = None) -> str:
    """Return the sentences that limit the answer about two variants.

    Args:
        a, b: the entries of the two variants in sweep.json (see `lm.sweeps.storage.results.sweep_record`). They use the
            same text and have equally many learning rates.
        search: the random search in sweep.json.
    """
    parameters = _either(*(f"{v['n_params']:,}" for v in (a, b)))
    per_parameter = _either(*(tokens_per_parameter(v) for v in (a, b)))
    sentence = (
        f"At this size ({parameters} parameters, {per_parameter} tokens per parameter), on this text "
        f"({a['data']['name']}), {_tuning([(a, b)], search)}."
    )
    if _tokens(a) != _tokens(b):
        sentence += f" The two trained on different numbers of tokens: {_tokens(a):,} and {_tokens(b):,}."
    return sentence


def describe_scope_of_sizes(pairs: dict[str, tuple[dict, dict]]) -> str:
    """Return the sentence that limits the answer about two variants at several sizes.

    Args:
        pairs: by size, the entries of the two variants as in `describe_scope`.
    """
    variants = [variant for pair in pairs.values() for variant in pair]
    parameters = _range(variants, lambda v: v["n_params"], lambda v: f"{v['n_params']:,}")
    per_parameter = _range(variants, _ratio, tokens_per_parameter)
    extrapolated = [size for size, pair in pairs.items() if any(v.get("rate_from") for v in pair)]
    return (
        f"At these sizes ({parameters} parameters, {per_parameter} tokens per parameter), on this text "
        f"({variants[0]['data']['name']}), {_tuning(list(pairs.values()))}"
        + (f", and extrapolated to {enumerate_names(extrapolated)}" if extrapolated else "")
        + "."
    )


def describe_scope_of_texts(pairs: list[tuple[dict, dict]]) -> str:
    """Return the sentence that limits the answer about two variants on several texts.

    Args:
        pairs: for each text, the entries of the two variants as in `describe_scope`.
    """
    variants = [variant for pair in pairs for variant in pair]
    parameters = _range(variants, lambda v: v["n_params"], lambda v: f"{v['n_params']:,}")
    texts = dict.fromkeys(variant["data"]["name"] for variant in variants)
    return (
        f"At this size ({parameters} parameters, {_range(variants, _ratio, tokens_per_parameter)} tokens per "
        f"parameter), on these texts ({enumerate_names(list(texts))}), {_tuning(pairs)}."
    )


def _range(variants: list[dict], key: Callable[[dict], float], show: Callable[[dict], str]) -> str:
    low, high = show(min(variants, key=key)), show(max(variants, key=key))
    return low if low == high else f"{low} to {high}"


def tokens_per_parameter(variant: dict) -> str:
    """Return the training tokens of one run per parameter of the model, rounded.

    >>> tokens_per_parameter({"n_params": 300, "config": {"train": {"steps": 10, "batch_size": 8, "seq_len": 16}}})
    '4.3'
    """
    ratio = _ratio(variant)
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2g}"


def _ratio(variant: dict) -> float:
    return _tokens(variant) / max(variant["n_params"], 1)


def _tokens(variant: dict) -> int:
    train = variant["config"]["train"]
    return train["steps"] * train["batch_size"] * train["seq_len"]


def _either(a: str, b: str) -> str:
    return a if a == b else f"{a} and {b}"


def _tuning(pairs: list[tuple[dict, dict]], search: dict | None = None) -> str:
    held_by_pair = [held_hyperparameters(a["config"], b["config"]) for a, b in pairs]
    drawn = searched_hyperparameters(search["space"]) if search else []
    held = [name for name in HYPERPARAMETERS if all(name in names for names in held_by_pair) and name not in drawn]
    fixed = f"at fixed {enumerate_names(held)}: " if held else ""
    if search:
        return f"{fixed}each variant was tuned by {len(search['trials'])} random trials over {enumerate_names(drawn)}"
    low, high = (choose(len(a["grid"]) for a, _ in pairs) for choose in (min, max))
    if high == 1:
        return f"{fixed}nothing was tuned, because each variant has one learning rate"
    return f"{fixed}only the learning rate was tuned, over {low if low == high else f'{low} to {high}'} values"


def held_hyperparameters(a: dict, b: dict) -> list[str]:
    """Return the hyperparameters that were fixed at one value, apart from those in which the two configs differ.

    >>> adam = {"optimizer": {"name": "adamw", "b2": 0.95, "warmup_steps": 20}, "train": {"batch_size": 8}}
    >>> held_hyperparameters(adam, adam | {"optimizer": adam["optimizer"] | {"warmup_steps": 0}})
    ['b2', 'decay', 'weight decay', 'batch size']
    """
    held = []
    for name, keys in HYPERPARAMETERS.items():
        users = [config for config in (a, b) if name not in UNUSED.get(config["optimizer"]["name"], ())]
        if users and all(_value(users[0], key) == _value(users[-1], key) for key in keys):
            held.append(name)
    return held


def searched_hyperparameters(keys) -> list[str]:
    """Return the names of the hyperparameters that these config keys set.

    >>> searched_hyperparameters(["optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.clip_norm"])
    ['learning rate', 'warm-up', 'clip norm']
    """
    names = {key: name for name, keys in HYPERPARAMETERS.items() for key in keys}
    return list(dict.fromkeys(names.get(key, key.rpartition(".")[2].replace("_", " ")) for key in keys))


def _value(config: dict, key: str):
    section, name = key.split(".")
    return config[section].get(name)  # sweeps of older versions lack the newest keys


def enumerate_names(names: list[str]) -> str:
    """Join names with commas and "and".

    >>> enumerate_names(["b2", "warm-up", "decay"])
    'b2, warm-up and decay'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
