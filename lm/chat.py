"""Talk to a model that was trained on chats: python -m lm.chat runs/NAME."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator

import lm
from lm.command_line.checkpoint import add_checkpoint
from lm.data import chats
from lm.data.chats import Turn
from lm.generation import options
from lm.system.errors import UserError, with_exit_code
from lm.system.files import read_json
from lm.system.parser import Parser
from lm.system.text_tables import say, write
from lm.workdir.saved_run import WEIGHTS_OF

EPILOG = """\
examples:
  python -m lm.chat runs/mine
  python -m lm.chat runs/mine --system "You are a pirate." --temperature 0
  printf 'Hello\\nAnd now in French\\n' | python -m lm.chat runs/mine

Each line is a message; Ctrl-C ends an answer, Ctrl-D the chat. Turns are written as in training: docs/data.md, "Chats".
The model remembers train.seq_len tokens; when they are full, the oldest messages are forgotten, which is said.

exit codes: 0 finished; 1 a file cannot be read at the moment; 2 invalid arguments; 130 Ctrl-C at a prompt.
"""
OPTIONS = ("n_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
PROMPT = "> "


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("chat", "Talk to a model that was trained on chats.", EPILOG)
    add_checkpoint(parser)
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="the system's turn before the first message"
    )
    options.add_arguments(parser, OPTIONS)
    return parser.parse_args(argv)


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    a = parse_arguments(argv)
    given = {name: getattr(a, name) for name in OPTIONS}
    options.check_options(given, options.flag)
    run = lm.load(a.workdir, a.step)
    run.require_next_token("a chat")
    from lm.generation.chat import Conversation
    from lm.generation.filters import Sampling  # imports jax

    n_tokens = given.pop("n_tokens")
    seed = given.pop("seed")
    note(f"{a.workdir}, step {run.step}")
    if text := check_chats(run):
        note(text)
    talk = Conversation(
        run.decoder, run.tokenizer, Sampling(**given), n_tokens, system=a.system, seed=seed
    )
    from lm.training.memory import report_out_of_memory

    out_of_memory = "on an accelerator, JAX_PLATFORMS=cpu uses the memory of the host"
    for message in messages():
        try:
            with report_out_of_memory(out_of_memory), interrupting(talk):
                for part in talk.answer(message, note):
                    write(part)
        except UserError as error:
            if not sys.stdin.isatty():  # a script must not go on without the answer
                raise
            note(str(error))
            continue
        write("\n")
    return 0


def check_chats(run) -> str | None:
    """Return a warning about a model that does not know the turns of chats; None if it does.

    Raises:
        UserError: its tokenizer cannot write them.
    """
    if run.tokenizer is None:
        raise UserError(f"{run.path} has no tokenizer, only token ids; a chat needs text")
    try:
        chats.encode(
            run.tokenizer, [chats.render(Turn(role, "")) for role in ("user", "assistant")]
        )
    except UserError:
        raise UserError(
            f"{run.path}: its tokenizer cannot write the markers of chats ({chats.START}user ...); train on chats "
            '(docs/data.md, "Chats"), or continue texts with lm.generate'
        ) from None
    if run.config.data.targets == "assistant":
        return None
    try:
        record = read_json(run.path / "run.json", {"data": ({"name": str}, None)})["data"] or {}
    except FileNotFoundError:
        record = {"name": WEIGHTS_OF}
    if record.get("chats") or (
        record.get("name", "").startswith(WEIGHTS_OF) and chats.marker_ids(run.tokenizer)
    ):
        return None
    return (
        f"WARNING: {run.path} was not trained on chats ({chats.START}user ...), so its answers "
        "continue any text"
    )


def messages() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; in a terminal they can be edited.

    Raises:
        UserError: a line is no text.
    """
    try:
        yield from _lines()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not {error.encoding} text ({error.reason})") from None


def _lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  line editing of input()
            try:
                line = input(PROMPT)
            except EOFError:
                write("\n")
                return
        elif not (line := sys.stdin.readline()):
            return
        if line := line.strip():
            yield line


@contextlib.contextmanager
def interrupting(talk) -> Iterator[None]:
    """Return a context in which Ctrl-C ends the answer in place of the process."""

    def interrupt(*_) -> None:
        talk.interrupted = True

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def note(text: str) -> None:
    """Print what is not an answer."""
    say(f"[{text}]", sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
