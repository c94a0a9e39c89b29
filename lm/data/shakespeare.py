"""Tiny Shakespeare: downloaded once, prepared as the TFDS directory of TFDS's own builder.

TFDS's builder needs TensorFlow, and retries for minutes without a network. This module avoids both.
"""

import hashlib
import http.client
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path

from lm.config import SPLITS
from lm.data import cache
from lm.system.errors import Unavailable
from lm.system.urls import answered

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SIZE = 1_115_394  # bytes; the text is ASCII
TIMEOUT = 10.0  # seconds for each answer
DEADLINE = 60.0  # seconds for the whole file


def download_and_prepare(root: Path, say: Callable[[str], None]) -> Path:
    """Download Tiny Shakespeare into a TFDS root; its directory appears complete or not at all.

    Raises Unavailable, which lists alternatives, if it cannot be downloaded; UserError if the root
    cannot be written.
    """
    say(f"downloading Tiny Shakespeare (1.1 MB, once) into {root}")
    text = download().decode("ascii")
    directory = root / "tiny_shakespeare" / "1.0.0"
    cache.publish(
        directory, lambda work: _prepare(text, work), "--config.data.data_dir=DIR or TFDS_DATA_DIR"
    )
    return directory


def download() -> bytes:
    """Download the file at URL and verify its checksum; raises Unavailable."""
    # OSError has URLError, timeouts and TLS errors; HTTPException is for answers that are not HTTP.
    try:
        content = answered(_read, seconds=DEADLINE)
    except (OSError, http.client.HTTPException) as e:
        # a quoted answer may contain line ends
        reason = " ".join(str(getattr(e, "reason", e)).split())
        raise _unavailable(reason or type(e).__name__) from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise _unavailable(
            f"wrong checksum of the {len(content)} bytes received; expected sha256 {SHA256[:12]}..."
        )
    return content


def _read() -> bytes:
    with urllib.request.urlopen(URL, timeout=TIMEOUT) as response:
        return response.read(SIZE + 1)


def _unavailable(reason: str) -> Unavailable:
    return Unavailable(
        f"Tiny Shakespeare is not on this machine and cannot be downloaded from {URL} ({reason}).",
        "Do one of the following: 1. run once with a network connection; the text is then kept;",
        "2. give a TFDS root that contains a prepared tiny_shakespeare: "
        "--config.data.data_dir=DIR, or TFDS_DATA_DIR;",
        "3. train on another text: another --config.data.mixture if there is one, else "
        "--config.data.source=text:PATH, or --config.data.offline=python_docs to fall back to the "
        "documentation inside Python without a network.",
    )


def _prepare(text: str, work: Path) -> None:
    """Write the files of the TFDS directory of version 1.0.0 into `work`."""
    import tensorflow_datasets as tfds

    # The same boundaries as in TFDS's builder.
    i = int(len(text) * 0.9)
    j = i + int((len(text) - i) * 0.5)

    with tfds.core.registered.skip_registration():

        class TinyShakespeare(tfds.core.GeneratorBasedBuilder):
            name = "tiny_shakespeare"
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
                return tfds.core.DatasetInfo(builder=self, features=features, homepage=URL)

            def _split_generators(self, dl_manager):
                parts = zip(SPLITS, (text[:i], text[i:j], text[j:]), strict=True)
                return {split: self._generate_examples(split, part) for split, part in parts}

            def _generate_examples(self, split, part):
                yield split, {"text": part}

    tfds.disable_progress_bar()
    builder = TinyShakespeare(data_dir=work / "build", file_format="array_record")
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
    for file in (work / "build" / "tiny_shakespeare" / "1.0.0").iterdir():
        file.rename(work / file.name)
    shutil.rmtree(work / "build")
