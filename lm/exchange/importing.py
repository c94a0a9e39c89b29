"""Import a checkpoint of Hugging Face: write the directory of a run that every command reads."""

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from lm import parameters
from lm.config import to_dict
from lm.errors import UserError
from lm.exchange.exporting import SETTINGS
from lm.files import to_json
from lm.huggingface.config_files import read_config
from lm.huggingface.tokenizer_files import copy_settings, load_tokenizer
from lm.huggingface.weights import load_params, to_device
from lm.workdir.checkpoints import Checkpoints, bytes_in_flight
from lm.workdir.directory import Workdir
from lm.workdir.saved_run import WEIGHTS_OF, check_workdir, holds_run


def import_checkpoint(
    directory: str,
    workdir: str,
    *,
    seq_len: int | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Write a run with the weights and the tokenizer of a checkpoint, as its step 0.

    Args:
        directory: the checkpoint's directory.
        workdir: the directory to write; it must not hold a run.
        seq_len: train.seq_len of the run; None: see `read_config`.
        dtype: dtype of parameters and computation; None: the checkpoint's.
        say: called with each line for the user.

    Raises:
        UserError: if the checkpoint is damaged or not supported, or the workdir holds a run.
    """
    config = read_config(directory, seq_len=seq_len, dtype=dtype)
    if holds_run(workdir):
        raise UserError(f"--workdir {workdir} already holds a run, which an import does not replace; give another one")
    check_workdir(workdir, config, resume=False)  # before the weights are read
    tokenizer = load_tokenizer(directory, config)
    if tokenizer is None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="none"))
    params = to_device(load_params(directory, config))
    digest = hashlib.sha256(to_json(to_dict(config)).encode()).hexdigest()
    source = {"name": f"{WEIGHTS_OF}{directory}", "fingerprint": digest}
    meta = {
        "data": source["name"],
        "data_fingerprint": source["fingerprint"],
        "tokenizer": tokenizer and tokenizer.to_json(),
        "config": to_dict(config),
    }
    with closing(Workdir(workdir)) as run:
        for line in run.start(config, data=source):
            say(line)
        if tokenizer:
            run.write_text("tokenizer.json", tokenizer.to_json())
        copy_settings(Path(directory), Path(workdir) / SETTINGS)
        with closing(Checkpoints(run.path, say=say, in_flight=bytes_in_flight(params))) as checkpoints:
            checkpoints.save(0, {"params": params}, meta)
            checkpoints.wait()
    if tokenizer is None:
        say(f"WARNING: {directory} has no tokenizer.json: the run has no tokenizer and takes token ids only")
    n, m = parameters.count(parameters.parameter_table(config.model)), config.model
    say(f"{workdir}: {n:,} parameters in {m.param_dtype}, {config.train.seq_len} positions; step 0 of a run")
