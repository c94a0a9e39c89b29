"""Generate text with a trained model: python -m lm.generate --workdir runs/NAME --prompt "ROMEO:"."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import lm
from lm.command_line.checkpoint import add_checkpoint
from lm.data.tokenizers import known_prompt
from lm.generation import options
from lm.system.errors import UserError, with_exit_code
from lm.system.files import expanded, refuse_pointer, to_json
from lm.system.parser import Parser
from lm.system.text_tables import say, write

EPILOG = """\
examples:
  python -m lm.generate --workdir runs/mine --prompt "ROMEO:"
  python -m lm.generate --workdir runs/mine --prompt "ROMEO:" --samples 3 --temperature 1 --top-p 0.9 --stop "JULIET"
  python -m lm.generate --workdir runs/mine --prompt-file prompts.txt --json > texts.jsonl
  echo "To be" | python -m lm.generate --workdir runs/mine --prompt-file -

The model sees at most train.seq_len tokens. On a longer text this window slides by half its length.

exit codes: 0 finished; 1 a file cannot be read at the moment; 2 invalid arguments; 130 Ctrl-C.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("generate", "Generate text with a trained model.", EPILOG)
    add_checkpoint(parser)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue; may be repeated (default: a newline)",
    )
    add(
        "--prompt-file",
        metavar="FILE",
        help="file with one prompt per line; -: read one prompt from standard input",
    )
    options.add_arguments(parser)
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this string; may be repeated",
    )
    special_tokens = (
        "encode special tokens of prompts, such as <|endoftext|>, as these tokens, or as text "
        "(default: as in the model's own data)"
    )
    add("--special-tokens", action=argparse.BooleanOptionalAction, help=special_tokens)
    add("--json", action="store_true", help="print one line of JSON per text")
    return parser.parse_args(argv)


def read_prompts(a: argparse.Namespace) -> list[str]:
    """Return the prompts of the arguments, a file or standard input; none: the default one."""
    if a.prompt and a.prompt_file is not None:
        raise UserError("--prompt and --prompt-file: give one of them")
    if "" in (a.prompt or []):
        raise UserError("--prompt is empty; the model needs at least one token to continue")
    if a.prompt_file is None:
        return a.prompt or []
    try:
        content = (
            sys.stdin.buffer.read()
            if a.prompt_file == "-"
            else Path(expanded(a.prompt_file)).read_bytes()
        )
        refuse_pointer(a.prompt_file, content)
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt-file: {a.prompt_file} is not UTF-8 text ({error.reason})"
        ) from None
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"--prompt-file: {a.prompt_file}: {error.strerror}") from None
    text = text.replace("\r\n", "\n").removesuffix("\n")
    # splitlines() ends lines at form feeds, too
    prompts = [text] if a.prompt_file == "-" else text.split("\n")
    if "" in prompts:
        raise UserError(
            f"--prompt-file: {a.prompt_file} has an empty prompt; the model needs at least one "
            "token"
        )
    return prompts


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a = parse_arguments(argv)
    arguments = {name: getattr(a, name) for name in (*options.Options.__dataclass_fields__, "stop")}
    options.check_options(arguments, options.flag)
    prompts = read_prompts(a)
    run = lm.load(a.workdir, a.step)
    if a.special_tokens is not None:
        run = run.with_special_tokens(a.special_tokens)
    say(f"[{a.workdir}, step {run.step}]", sys.stderr)
    from lm.training.memory import report_out_of_memory  # imports jax

    prompts = prompts or [known_prompt("\n", run.tokenizer) if run.tokenizer else "\n"]
    with report_out_of_memory("use a smaller --batch-size or --tokens"):
        show(a, prompts, run.stream(prompts, **arguments))
    return 0


def show(a: argparse.Namespace, prompts: list[str], updates: Iterator[list]) -> None:
    """Print each continuation, in order, as soon as it is finished; a single one while it is being
    generated.
    """
    n_printed = 0
    if len(prompts) * a.n_samples == 1 and not a.json:
        for (row,) in updates:
            text = prompts[0] + row.text
            write(text[n_printed:])
            n_printed = len(text)
        write("\n")
        return
    for rows in updates:
        while n_printed < len(rows) and (row := rows[n_printed]).finish:
            if a.json:
                record = {
                    "prompt": row.prompt,
                    "sample": row.sample,
                    "text": row.text,
                    "finish": row.finish,
                }
                write(to_json(record | {"n_tokens": len(row.ids)}) + "\n")
            else:
                title = f"---- prompt {n_printed // a.n_samples + 1}, sample {row.sample + 1} ----"
                write(f"{title}\n{row.prompt}{row.text}\n")
            n_printed += 1


if __name__ == "__main__":
    sys.exit(main())
