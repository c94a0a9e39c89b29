"""From a sweep's plan to variants that can be trained: resolved, matched in size, and known to differ."""

import dataclasses
import itertools

from lm import data, parameters
from lm.config import Config
from lm.cost import flops
from lm.data import Corpus
from lm.errors import UserError
from lm.sweeps.fingerprint import differing_keys, identity
from lm.sweeps.results import tuning_runs
from lm.sweeps.spec import LEARNING_RATE, Match, Plan
from lm.training.run import resolve_config
from lm.training.warm_start import CarriedOver, carry_over


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant with its config resolved, its data, and what it costs; `config` has the first rate of the grid."""

    config: Config
    corpus: Corpus
    grid: tuple[float, ...]
    n_params: int
    flops: float
    identity: str
    carried: dict[int, CarriedOver]  # by seed, where the variant starts from other runs; else empty

    def member(self, rate: float, seed: int) -> Config:
        return dataclasses.replace(
            self.config,
            optimizer=dataclasses.replace(self.config.optimizer, learning_rate=rate),
            train=dataclasses.replace(self.config.train, seed=seed),
        )


def prepare(plan: Plan, say) -> dict[str, Variant]:
    """The variants, resolved and matched; raises UserError for data that is not there and variants that do nothing."""
    corpora, resolved, problems = {}, {}, []
    for name, config in plan.configs.items():
        key = (config.data, config.train.seq_len)
        if key not in corpora:
            corpora[key] = data.open_corpus(config.data, seq_len=config.train.seq_len, say=say)
        try:
            resolved[name] = resolve_config(config, corpora[key]), corpora[key]
        except UserError as error:
            problems += [f"variant {name!r}: {problem}" for problem in error.problems]
        if missing := [split for split in ("validation", "test") if split not in corpora[key].splits]:
            problems.append(f"variant {name!r}: {corpora[key].name} has no {missing[0]} split, which a sweep needs")
    if problems:
        raise UserError(*problems)
    for name, match in plan.matches.items():
        config, corpus = resolved[name]
        resolved[name] = matched(config, match, resolved[match.variant][0]), corpus
    variants = {}
    for name, (config, corpus) in resolved.items():
        n_params = parameters.count(parameters.parameter_table(config.model))
        cost = flops.flops_per_token(config.model, config.train.seq_len)
        variant = Variant(config, corpus, plan.grids[name], n_params, cost, "", {})
        if config.init_from is not None:
            seeds = [*plan.seeds, *(plan.tuning_seeds if len(variant.grid) > 1 else ())]
            configs = {seed: variant.member(variant.grid[0], seed) for seed in seeds}
            carried = {s: carry_over(c, corpus, lambda text: None) for s, c in configs.items()}
            for alike in _alike(carried):
                say(f"{name}, {len(alike)} seeds: {carried[alike[0]].describe()}")
            variant = dataclasses.replace(variant, carried=carried)
        identified = identity(config, corpus, variant.carried.get(plan.seeds[0]))
        variants[name] = dataclasses.replace(variant, identity=identified)
    check_that_they_differ(variants)
    return variants


def _alike(carried: dict[int, CarriedOver]) -> list[list[int]]:
    """The seeds, those together of whose runs the same parameters are carried over."""
    groups = {}
    for seed, c in carried.items():
        groups.setdefault((tuple(c.values), tuple(c.fresh), tuple(c.left)), []).append(seed)
    return list(groups.values())


def matched(config: Config, match: Match, target: Config) -> Config:
    """The config with the width at which parameters or FLOPs come nearest to the target's: both are linear in it."""

    def with_width(d_ff: int) -> Config:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=d_ff))

    def measure(c: Config) -> float:
        if match.what == "flops":
            return flops.flops_per_token(c.model, c.train.seq_len)
        return parameters.count(parameters.parameter_table(c.model))

    one, two = measure(with_width(1)), measure(with_width(2))
    return with_width(max(1, 1 + round((measure(target) - one) / (two - one))))


def check_that_they_differ(variants: dict[str, Variant]) -> None:
    """Raises UserError if two variants are one experiment, grids of learning rates aside."""
    problems = []
    for (a, first), (b, second) in itertools.combinations(variants.items(), 2):
        if first.identity == second.identity:
            keys = differing_keys(first.config, second.config)
            verbs = "differs and does" if len(keys) == 1 else "differ and do"
            reason = f"; {', '.join(keys)} {verbs} nothing" if keys else ""
            problems.append(f"variants {a!r} and {b!r} are the same experiment{reason}")
    if problems:
        raise UserError(*problems)


def describe(plan: Plan, variants: dict[str, Variant]) -> str:
    """The question and a table of the variants."""
    base = variants[plan.sweep.baseline]
    rows = [("variant", "parameters", "FLOPs/token", "learning rates", "changes")]
    for name, v in variants.items():
        changes = dict(plan.sweep.variants[name])
        if name in plan.matches:
            match, target = plan.matches[name], variants[plan.matches[name].variant]
            more = f"{v.n_params - target.n_params:+,} parameters, {v.flops - target.flops:+,.0f} FLOPs/token"
            changes["model.d_ff"] = f"{v.config.model.d_ff} ({match.what} of {match.variant!r}: {more})"
        changes.pop(LEARNING_RATE, None)
        described = ", ".join(f"{key}={value}" for key, value in changes.items()) or "nothing: the base"
        grid = f"{v.grid[0]:g} to {v.grid[-1]:g} ({len(v.grid)})"
        rows.append((name, f"{v.n_params:,}", f"{v.flops:,.0f}", grid, described))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        f"question: {plan.sweep.question}",
        f"base: {plan.sweep.base}, data {base.corpus.name}, budget {plan.budget_name}",
    ]
    for *cells, last in rows:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + "  " + last)
    t = base.config.train
    tuning = len(tuning_runs({name: v.grid for name, v in variants.items()}, plan.tuning_seeds))
    final = sum(min(3, len(v.grid)) for v in variants.values()) * len(plan.seeds)
    lines.append(
        f"{tuning} runs to tune the learning rate ({len(plan.tuning_seeds)} seeds), then at most {final} of the best "
        f"rate and its neighbours ({len(plan.seeds)} fresh seeds); {t.steps} steps of {t.batch_size * t.seq_len:,} "
        "tokens each"
    )
    return "\n".join(lines)


def flops_of_runs(plan: Plan, variants: dict[str, Variant]) -> float:
    """The floating-point operations of all training, at most; evaluations are left out."""
    total = 0.0
    for v in variants.values():
        n_runs = len(tuning_runs({"": v.grid}, plan.tuning_seeds)) + min(3, len(v.grid)) * len(plan.seeds)
        total += n_runs * v.flops * v.config.train.steps * v.config.train.batch_size * v.config.train.seq_len
    return total
