"""Prepare the variants of a sweep: resolve configs, match widths and lengths, count costs, refuse duplicates."""

import dataclasses
import itertools
from collections.abc import Callable

from lm import data, parameters
from lm.command_line.loading import check_config
from lm.config import MESH_AXES, Config, flatten, to_dict
from lm.config.values import show
from lm.cost import flops
from lm.data import Corpus
from lm.errors import UserError, first_line
from lm.sweeps.design.axes import LEARNING_RATE, Match, Values
from lm.sweeps.design.search import BATCH_SIZE, describe_space
from lm.sweeps.design.seeds import Seeds, count, seeds_of
from lm.sweeps.design.spec import SweepPlan
from lm.sweeps.storage.results import tuning_runs
from lm.sweeps.training.fingerprint import differing_keys, fingerprint
from lm.text_tables import plural, table
from lm.training.memory import check_memory
from lm.training.run import resolve_config
from lm.training.warm_start import WarmStart, warm_start


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant that can be trained.

    Attributes:
        config: the resolved config with seed 0, at the first learning rate of the grid, or without a trial's values.
        corpus: its data.
        grid: its learning rates.
        n_params: the number of parameters.
        flops: training FLOPs per token.
        without_embeddings: (n_params, flops) without embeddings and the head.
        fingerprint: see lm.sweeps.training.fingerprint; empty if the variant cannot be traced.
        warm_starts: by seed, the parameters that a run starts from; empty: random.
        rate_from: the variant whose best learning rate this one uses, scaled; None: it is tuned itself.
        trials: by learning rate, the values of each random trial; empty without a search.
    """

    config: Config
    corpus: Corpus
    grid: tuple[float, ...]
    n_params: int
    flops: float
    fingerprint: str
    warm_starts: dict[int, WarmStart]
    rate_from: str | None = None
    trials: dict[float, Values] = dataclasses.field(default_factory=dict)
    without_embeddings: tuple[int, float] = (0, 0.0)

    @property
    def tuning_grid(self) -> tuple[float, ...]:
        """Return the learning rates of the tuning runs."""
        return () if self.rate_from else self.grid

    @property
    def n_final_rates(self) -> int:
        """Return the largest number of learning rates that train with the fresh seeds."""
        return 1 if self.trials else min(3, len(self.grid))

    @property
    def tokens(self) -> int:
        """Return the training tokens of one run."""
        t = self.config.train
        return t.steps * t.batch_size * t.seq_len

    def run_config(self, rate: float, seed: int) -> Config:
        """Return the config of one run."""
        return with_trial(self.config, self.trials.get(rate, {}) | {LEARNING_RATE: rate, "train.seed": seed})


def resolve_variants(plan: SweepPlan, say: Callable[[str], None]) -> dict[str, Variant]:
    """Resolve all variants of a plan: open their data, compute matched widths and lengths, load warm starts, and trace.

    Args:
        plan: what `load_sweep` returned.
        say: called with each message.

    Returns:
        The variants by name.

    Raises:
        UserError: a config is invalid, data lacks a split, or two variants are the same experiment.
    """
    resolved = _resolve_configs(plan, say)
    for name, match in plan.matches.items():
        config, corpus = resolved[name]
        resolved[name] = matched(config, match, resolved[match.of][0]), corpus
    for name, match in plan.lengths.items():
        config, corpus = resolved[name]
        resolved[name] = trained_on(config, match.ratio * _n_params(resolved[match.of][0])), corpus
    _check_computed(plan, resolved)
    variants = {}
    for name, (config, corpus) in resolved.items():
        cost = flops.flops_per_token(config.model, config.train.seq_len)
        rate_from = plan.rates_from.get(name)
        without = _without_embeddings(config)
        trials = {trial[LEARNING_RATE]: trial for trial in plan.trials}
        variant = Variant(config, corpus, plan.grids[name], _n_params(config), cost, "", {}, rate_from, trials, without)
        variant = dataclasses.replace(variant, warm_starts=_warm_starts(name, variant, plan, say))
        variants[name] = dataclasses.replace(variant, fingerprint=_traced(name, variant, plan, say))
    check_distinct(variants, plan.sweep.variants)
    return variants


def _check_computed(plan: SweepPlan, resolved: dict[str, tuple[Config, Corpus]]) -> None:
    """Raise UserError with the mistakes in the configs whose width or length was computed."""
    problems = []
    for name in dict.fromkeys([*plan.matches, *plan.lengths]):
        config, _ = resolved[name]
        matches = {"model.d_ff": plan.matches.get(name), "train.steps": plan.lengths.get(name)}
        computed = " and ".join(f"{key} from {match}" for key, match in matches.items() if match)
        try:
            check_config(config)
            check_memory(config, dict.fromkeys(MESH_AXES, 1))
        except UserError as error:
            problems += [f"variant {name!r}, with {computed}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)


def _traced(name: str, variant: Variant, plan: SweepPlan, say) -> str:
    """Return the fingerprint of a variant; if it cannot be traced, warn and return "", because only its runs fail."""
    try:
        config = variant.run_config(variant.grid[0], variant.config.train.seed)
        return fingerprint(config, variant.corpus, variant.warm_starts.get(seeds_of(plan.seeds, name)[0]))
    except UserError:
        raise
    except Exception as error:
        say(f"WARNING: variant {name!r} cannot be traced: {first_line(error)}")
        return ""


def _resolve_configs(plan: SweepPlan, say) -> dict[str, tuple[Config, Corpus]]:
    corpora, resolved, problems = {}, {}, []
    for name, config in plan.configs.items():
        key = (config.data, config.train.seq_len)
        if key not in corpora:
            corpora[key] = data.open_corpus(config.data, seq_len=config.train.seq_len, say=say)
        try:
            resolved[name] = resolve_config(config, corpora[key]), corpora[key]
            check_memory(resolved[name][0], dict.fromkeys(MESH_AXES, 1))  # each device trains its own runs
        except UserError as error:
            problems += [f"variant {name!r}: {problem}" for problem in error.problems]
        if config.train.ema is not None:
            problems.append(f"variant {name!r}: train.ema: a sweep does not evaluate this average; use none")
        if missing := [split for split in ("validation", "test") if split not in corpora[key].splits]:
            problems.append(f"variant {name!r}: {corpora[key].name} has no {missing[0]} split, which a sweep needs")
    if problems:
        raise UserError(*problems)
    return resolved


def _warm_starts(name: str, variant: Variant, plan: SweepPlan, say) -> dict[int, WarmStart]:
    """Return by seed the parameters that the variant's runs start from."""
    if variant.config.init_from is None:
        return {}
    seeds = [*seeds_of(plan.seeds, name), *(seeds_of(plan.tuning_seeds, name) if len(variant.tuning_grid) > 1 else ())]
    configs = {seed: variant.run_config(variant.grid[0], seed) for seed in seeds}
    warm_starts = {seed: warm_start(config, variant.corpus, lambda text: None) for seed, config in configs.items()}
    for alike in _same_parameters(warm_starts):
        say(f"{name}, {plural(len(alike), 'seed')}: {warm_starts[alike[0]].describe()}")
    return warm_starts


def _same_parameters(warm_starts: dict[int, WarmStart]) -> list[list[int]]:
    """Group the seeds whose warm starts load the same parameters."""
    groups = {}
    for seed, start in warm_starts.items():
        groups.setdefault((tuple(start.values), tuple(start.initialized), tuple(start.unused)), []).append(seed)
    return list(groups.values())


def matched(config: Config, match: Match, target: Config) -> Config:
    """Return a config with the d_ff at which its parameters or FLOPs, linear in d_ff, are nearest to another config's.

    Args:
        config: the resolved config whose width is to be set.
        match: whether to match parameters or FLOPs.
        target: the resolved config of the variant `match.of`.
    """

    def with_width(d_ff: int) -> Config:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=d_ff))

    def measure(c: Config) -> float:
        if match.what == "flops":
            return flops.flops_per_token(c.model, c.train.seq_len)
        return _n_params(c)

    one, two = measure(with_width(1)), measure(with_width(2))
    return with_width(max(1, 1 + round((measure(target) - one) / (two - one))))


def trained_on(config: Config, tokens: float) -> Config:
    """Return the config with train.steps for this many tokens, and warm-up, decay and evaluations in proportion."""
    t, o = config.train, config.optimizer
    steps = max(1, round(tokens / (t.batch_size * t.seq_len)))

    def in_proportion(n: int | None) -> int | None:
        return n and max(1, round(n * steps / max(t.steps, 1)))

    warmup_steps, decay_steps = min(in_proportion(o.warmup_steps), steps - 1), in_proportion(o.decay_steps)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(t, steps=steps),
        optimizer=dataclasses.replace(o, warmup_steps=warmup_steps, decay_steps=decay_steps),
        eval=dataclasses.replace(config.eval, every=in_proportion(config.eval.every)),
    )


def with_trial(config: Config, values: Values) -> Config:
    """Return the config with values by dotted key.

    Another batch size keeps the number of training tokens and the batches of the evaluation: the steps, the warm-up,
    the decay and the steps between evaluations change in proportion.
    """
    t, found = config.train, config
    for key, value in values.items():
        section, name = key.split(".")
        found = dataclasses.replace(found, **{section: dataclasses.replace(getattr(found, section), **{name: value})})
    if values.get(BATCH_SIZE, t.batch_size) == t.batch_size:
        return found
    found = dataclasses.replace(
        found, eval=dataclasses.replace(found.eval, batch_size=config.eval.batch_size or t.batch_size)
    )
    return trained_on(found, t.steps * t.batch_size * t.seq_len)


def _n_params(config: Config) -> int:
    return parameters.count(parameters.parameter_table(config.model))


def _without_embeddings(config: Config) -> tuple[int, float]:
    """Return the parameters and the training FLOPs per token, both without embeddings and the head."""
    n_params = parameters.count_without_embeddings(parameters.parameter_table(config.model))
    return n_params, flops.flops_per_token_without_head(config.model, config.train.seq_len)


def check_distinct(variants: dict[str, Variant], changes: dict[str, Values]) -> None:
    """Raise UserError if two variants are the same experiment, apart from their learning rates.

    Two variants without a common learning rate may have equal configs: then they compare learning rates.

    Args:
        variants: the variants by name.
        changes: by name, the config values that each changes, as in the sweep file.
    """
    problems = []
    for (a, first), (b, second) in itertools.combinations(variants.items(), 2):
        if first.fingerprint != second.fingerprint or not first.fingerprint:
            continue
        keys = [key for key in differing_keys(first.config, second.config) if key != LEARNING_RATE]
        if not keys and not set(first.grid) & set(second.grid):
            continue
        values = flatten(to_dict(first.config))
        # Keys that the sweep file sets differently, or for one of the two only, but whose resolved values are equal.
        ours, theirs = ({key: repr(value) for key, value in changes[name].items()} for name in (a, b))
        same = sorted({key for key, _ in ours.items() ^ theirs.items()} - {*keys, LEARNING_RATE})
        reasons = [f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect here"] if keys else []
        reasons += [f"{key} is {show(values[key])} in both" for key in same]
        problems.append("; ".join([f"variants {a!r} and {b!r} are the same experiment", *reasons]))
    if problems:
        raise UserError(*problems)


def describe_variants(plan: SweepPlan, variants: dict[str, Variant]) -> str:
    """Return the question, a table of the variants, and the number of runs."""
    base = variants[plan.sweep.baseline]
    same_tokens = len({v.tokens for v in variants.values()}) == 1
    tuned, best = ("trials", "trial") if plan.trials else ("learning rates", "rate and its neighbors")
    rows = [["variant", "parameters", "FLOPs/token", "tokens per run", tuned, "changes"]]
    for name, v in variants.items():
        grid = f"{v.grid[0]:g} to {v.grid[-1]:g} ({len(v.grid)})" if len(v.grid) > 1 else f"{v.grid[0]:g}"
        grid = f"{len(v.trials)}" if v.trials else grid
        row = [name, f"{v.n_params:,}", f"{v.flops:,.0f}", f"{v.tokens:,}", grid, _changes(name, plan, variants)]
        row[4] += f" around the best of {v.rate_from}" * bool(v.rate_from)
        rows.append(row)
    if same_tokens:
        rows = [row[:3] + row[4:] for row in rows]
    t = base.config.train
    length = f"{t.steps} steps of {t.batch_size * t.seq_len:,} tokens each" if same_tokens else "tokens as listed above"
    tuning = len(tuning_runs({name: v.tuning_grid for name, v in variants.items()}, plan.tuning_seeds))
    final = sum(v.n_final_rates for v in variants.values()) * count(plan.seeds)
    texts = ", ".join(dict.fromkeys(v.corpus.name for v in variants.values()))
    *smaller, largest = map(str, plan.looks)
    fresh = " or ".join([", ".join(smaller), largest]) if smaller else largest
    return "\n".join(
        [
            f"question: {plan.sweep.question}",
            f"base: {plan.sweep.base}, data {texts}, budget {plan.budget_name}",
            table(rows, right=(1, 2) if same_tokens else (1, 2, 3)),
            *describe_space(plan.sweep.search, len(plan.trials)),
            f"{plural(tuning, 'run')} to tune {'by random search' if plan.trials else 'the learning rate'} "
            f"({plural(count(plan.tuning_seeds), 'tuning seed')}), then at most {final} runs at the best {best} "
            f"({fresh} fresh seeds); {length}",
            *_describe_seeds(plan.seeds, plan.tuning_seeds),
        ]
    )


def _describe_seeds(fresh: Seeds, tuning: Seeds) -> list[str]:
    """Return the seeds of a sweep, a line for each size if there are sizes with seeds of their own."""
    if not isinstance(fresh, dict):
        return [f"seeds {_range(fresh)}, tuning seeds {_range(tuning)}"]
    return [f"size {size}: seeds {_range(fresh[size])}, tuning seeds {_range(tuning[size])}" for size in fresh]


def _range(seeds: tuple[int, ...]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"


def _changes(name: str, plan: SweepPlan, variants: dict[str, Variant]) -> str:
    """Return what a variant changes, as in the sweep file, with a matched width and its remaining difference."""
    changes, v = dict(plan.sweep.variants[name]), variants[name]
    if name in plan.matches:
        match = plan.matches[name]
        target = variants[match.of]
        more = f"{v.n_params - target.n_params:+,} parameters, {v.flops - target.flops:+,.0f} FLOPs/token"
        changes["model.d_ff"] = f"{v.config.model.d_ff} ({match}: {more})"
    changes.pop(LEARNING_RATE, None)
    return ", ".join(f"{key}={value}" for key, value in changes.items()) or "nothing: the base"


def total_flops(plan: SweepPlan, variants: dict[str, Variant]) -> float:
    """Return an upper bound on the FLOPs of all training runs, evaluations not included."""
    total = 0.0
    for name, v in variants.items():
        n_runs = len(tuning_runs({name: v.tuning_grid}, plan.tuning_seeds)) + v.n_final_rates * count(plan.seeds)
        total += n_runs * v.flops * v.tokens
    return total
