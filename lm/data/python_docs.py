"""The documentation inside CPython 3.11.7: 1.4 MB of technical English without a network.

It consists of the reference manual's topics and the docstrings of the standard library, as
`tests/references/make_python_docs.py` wrote them, under the licence of Python
(python_docs_license.txt).
"""

import functools
import json
import lzma
from pathlib import Path

PATH = Path(__file__).with_suffix(".json.xz")


@functools.cache
def _content() -> dict:
    with lzma.open(PATH) as file:
        return json.load(file)


def version() -> list:
    """Return what identifies the text: the release, and the names and sizes of its files."""
    return _content()["version"]


def documents() -> list[str]:
    """Return the topics and the docstrings of each file as documents, in printable ASCII.

    They are ordered by a hash of their names, so that each part of a split by position has every
    kind of text.
    """
    return list(_content()["documents"])
