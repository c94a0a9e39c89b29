"""Sample text from a trained model: python -m lm.sample --workdir runs/NAME --prompt "ROMEO:"."""

import argparse
import re
import sys

from lm import runtime
from lm.config.schema import MAX_SAMPLE
from lm.config.values import short
from lm.errors import UserError, run_command


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a = command_line(argv)
    return run_command(lambda: sample(a))


def command_line(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lm.sample", description="Sample text from a trained model.")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the directory of the run")
    parser.add_argument("--step", default="best", metavar="N|best|latest", help="which checkpoint (default: best)")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="the text to continue (default: a newline)")
    parser.add_argument("--tokens", type=int, default=500, metavar="N", help="tokens to add (default: 500)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=0, metavar="K", help="sample from the K most likely; 0: from all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed gives another text (default: 0)")
    return parser.parse_args(argv)


def sample(a: argparse.Namespace) -> int:
    if problems := list(find_problems(a)):
        raise UserError(*problems)
    runtime.start_jax()
    from lm.training.sampling import load_run, sample_text

    step, params, config, tokenizer = load_run(a.workdir, a.step if a.step in ("best", "latest") else int(a.step))
    if len(tokenizer.encode(a.prompt)) == 0:
        raise UserError(f"--prompt: this run's tokenizer makes no token of {a.prompt!r}; use a word, for example")
    options = {"temperature": a.temperature, "top_k": min(a.top_k, tokenizer.vocab_size), "seed": a.seed}
    text = sample_text(params, config, tokenizer, prompt=a.prompt, n_tokens=a.tokens, **options)
    print(f"[{a.workdir}, step {step}]", file=sys.stderr)
    print(text)
    return 0


def find_problems(a: argparse.Namespace):
    if not re.fullmatch("best|latest|[0-9]{1,18}", a.step):
        yield f"--step: {short(a.step)} is not best, latest, or the number of a step"
    if not a.prompt:
        yield "--prompt: it is empty, and a sample continues at least one token"
    if not 1 <= a.tokens <= MAX_SAMPLE:
        yield f"--tokens: {short(a.tokens)} must be at least 1 and at most {MAX_SAMPLE}"
    if not 0 <= a.temperature < float("inf"):
        yield f"--temperature: {a.temperature} must be at least 0 and finite"
    if a.top_k < 0:
        yield f"--top_k: {short(a.top_k)} must be at least 0"
    if not 0 <= a.seed < 2**32:
        yield f"--seed: {short(a.seed)} must be at least 0 and less than 2**32"


if __name__ == "__main__":
    sys.exit(main())
