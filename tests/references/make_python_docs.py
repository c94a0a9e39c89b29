"""Write lm/data/python_docs.json.xz: the documentation inside CPython 3.11.7, which studies were
trained on.

It consists of the reference manual's topics (`pydoc_data.topics`, shown by `help("for")`) and the
docstrings of the standard library, which is parsed but not imported. The text is a function of the
Python release, except that some distributions leave modules out. Run once by hand, with Python
3.11.7: python tests/references/make_python_docs.py
"""

import ast
import hashlib
import inspect
import json
import lzma
import sys
import sysconfig
import unicodedata
from pathlib import Path
from pydoc_data.topics import topics

OUTPUT = Path(__file__).parents[2] / "lm" / "data" / "python_docs.json.xz"
# Modules and packages whose source is rich in docstrings: a second or two to read.
MODULES = """
_collections_abc _pydecimal _pyio _threading_local abc base64 bdb bisect bz2 calendar cmd code codecs codeop
collections concurrent configparser contextlib copy dbm difflib doctest email filecmp fileinput fnmatch fractions
ftplib functools genericpath getopt getpass graphlib hmac http imaplib importlib inspect io ipaddress json keyword
linecache logging lzma mimetypes numbers operator optparse os pathlib pdb pkgutil platform poplib py_compile pyclbr
queue random rlcompleter sched secrets selectors shelve shutil site smtplib socket socketserver ssl statistics
symtable tempfile textwrap threading timeit traceback typing unittest uuid wave wsgiref xmlrpc
""".split()  # noqa: SIM905

_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "..."})


def files() -> dict[str, Path]:
    """Return the source files of MODULES by their names; those of a package are sorted by path."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [
        p
        for name in MODULES
        for p in sorted((library / name).rglob("*.py")) or [library / f"{name}.py"]
    ]
    found = [path for path in paths if path.is_file() and not {"test", "tests"} & set(path.parts)]
    return {str(path.relative_to(library)): path for path in found}


def version() -> list:
    """Return what identifies the text without reading it: the Python release, the files and their
    sizes.
    """
    return [
        1,
        sys.version_info[:3],
        [[name, path.stat().st_size] for name, path in files().items()],
    ]


def documents() -> list[str]:
    """Return the topics, and the docstrings of each file as one document, in printable ASCII and
    newlines.

    They are ordered by a hash of their names, so that each part of a split by position has every
    kind of text.
    """
    named = {name: _docstrings(path) for name, path in files().items()}
    named |= {f"topic {name}": text for name, text in topics.items()}
    ordered = sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [f"{text}\n" for name in ordered if (text := _ascii(named[name]))]


def _docstrings(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_bytes()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, kinds)]
    return "\n\n".join(inspect.cleandoc(docstring) for docstring in docstrings if docstring)


def _ascii(text: str) -> str:
    text = unicodedata.normalize("NFKD", text.translate(_ASCII)).encode("ascii", "ignore").decode()
    return "".join(c for c in text.expandtabs() if c == "\n" or c.isprintable()).strip()


if __name__ == "__main__":
    assert sys.version_info[:3] == (3, 11, 7), "the published runs have the text of Python 3.11.7"
    content = json.dumps({"version": version(), "documents": documents()})
    OUTPUT.write_bytes(lzma.compress(content.encode(), preset=9))
