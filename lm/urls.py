"""URLs of text and of mirrors, through fsspec, which the extra [data] installs."""

import importlib
import re
from typing import Any

from lm.errors import UserError


def is_url(path: str) -> bool:
    """Return whether a path has a scheme, such as gs://BUCKET/FILE."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path, re.IGNORECASE) is not None


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it; raises UserError if its driver is not installed."""
    fsspec = optional("fsspec", url)
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: there is no driver for it ({error})") from None


def optional(module: str, path: str) -> Any:
    """Import a module of the extra [data]; raises UserError, with the command, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{path}: it needs {package}; pip install -e '.[data]' installs it") from None
