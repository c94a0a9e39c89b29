"""Sample text from a trained model: python -m lm.sample --workdir runs/NAME --prompt "ROMEO:"."""

import argparse
import sys

from lm.errors import UserError


def command_line(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lm.sample", description="Text from a trained model.")
    parser.add_argument("--workdir", required=True, help="the run's directory")
    parser.add_argument("--step", default="best", metavar="N|best|latest", help="which checkpoint (%(default)s)")
    parser.add_argument("--prompt", default="\n", help="the text to continue (a newline)")
    parser.add_argument("--tokens", type=int, default=500, help="how many tokens to add (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (%(default)s)")
    parser.add_argument("--top_k", type=int, default=0, help="draw among the k likeliest; 0: all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    a = command_line(argv)
    from lm.training.sampling import load_run, sample_text

    try:
        if a.step not in ("best", "latest") and not a.step.isdigit():
            raise UserError(f"--step {a.step}: give best, latest, or the number of a step")
        if not a.prompt or a.tokens < 1 or a.temperature < 0 or a.top_k < 0 or not 0 <= a.seed < 2**32:
            raise UserError(
                "--prompt must not be empty, --tokens at least 1, --temperature, --top_k and --seed at least 0"
            )
        step, params, config, tokenizer = load_run(a.workdir, int(a.step) if a.step.isdigit() else a.step)
        if len(tokenizer.encode(a.prompt)) == 0:
            raise UserError(f"--prompt {a.prompt!r} is no token to this run's tokenizer; use a word, for example")
        options = {"temperature": a.temperature, "top_k": min(a.top_k, tokenizer.vocab_size), "seed": a.seed}
        text = sample_text(params, config, tokenizer, prompt=a.prompt, n_tokens=a.tokens, **options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    print(f"[{a.workdir}, step {step}]", file=sys.stderr)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
