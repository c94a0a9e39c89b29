"""Evaluate a trained model on the tasks of lm-evaluation-harness: python -m lm.harness --workdir
RUN --tasks NAMES.
"""

import importlib.util
import json
import sys

from lm.command_line.checkpoint import STEP
from lm.config.values import path_argument
from lm.data import trusted
from lm.data.chats import NO_TEMPLATE
from lm.system.errors import UserError, first_line, with_exit_code
from lm.system.parser import Parser

EPILOG = """\
examples:
  python -m lm.harness --workdir runs/mine --tasks hellaswag,arc_easy --limit 100
  python -m lm.harness --workdir runs/mine --tasks my_task --include_path my_tasks --output_path results
  lm_eval ls tasks                                        (the tasks of the harness)

Needs the extra [eval]. Most tasks download their data; docs/evaluation.md has one that does not.

exit codes: 0 finished; 1 a file cannot be read at the moment; 2 invalid arguments; 130 Ctrl-C.
"""


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    what = (
        "Evaluate a trained model on tasks of lm-evaluation-harness. All other options are those "
        "of\n"
        "`lm_eval run`: --tasks, --num_fewshot, --limit, --include_path, --output_path, "
        "--log_samples, ..."
    )
    parser = Parser("harness", what, EPILOG)
    what = (
        "the directory of the run, or of a Hugging Face checkpoint; alone, it is the first argument"
    )
    parser.add_argument("--workdir", required=True, type=path_argument, metavar="DIR", help=what)
    parser.add_argument("--step", **STEP)
    windows = (
        "how long texts are split for perplexities: like the evaluation of a run (default), or "
        "like the harness's own models"
    )
    parser.add_argument(
        "--windows", default="training", choices=["training", "harness"], help=windows
    )
    trust = (
        "run the Python code that task files other than the harness's own name (!function); their "
        "folders are remembered"
    )
    parser.add_argument("--trust-tasks", action="store_true", help=trust)
    given = sys.argv[1:] if argv is None else argv
    if given and not given[0].startswith("-"):
        given = ["--workdir", *given]
    a, others = parser.parse_known_args(given)
    options = (other.partition("=")[0] for other in others)
    if any(
        len(option) > 2 and "--apply_chat_template".startswith(option) for option in options
    ):  # argparse takes short forms
        raise UserError(NO_TEMPLATE)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-eval is not installed; run: pip install -e '.[eval]'")
    from jinja2 import TemplateError
    from lm_eval.__main__ import cli_evaluate

    from lm.scoring.evaluation_harness import check_functions  # the import registers the model

    if a.trust_tasks:
        check_functions(trusted.remember_tasks)
    model_args = json.dumps({"workdir": a.workdir, "step": a.step, "windows": a.windows})
    sys.argv = [
        "lm_eval",
        "run",
        "--model",
        "lm",
        "--model_args",
        model_args,
        "--batch_size",
        "auto",
        *others,
    ]
    try:
        cli_evaluate()
    # unknown tasks, wrong task files, and templates that want to run code
    except (ValueError, TemplateError) as error:
        raise UserError(f"lm-eval: {first_line(error)}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
