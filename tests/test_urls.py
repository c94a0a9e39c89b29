"""Commands refuse directories in object stores before they write anything."""

import importlib
from pathlib import Path

import pytest

from lm.files import refuse_url

CONFIGS = Path(__file__).parent / "configs"


@pytest.mark.parametrize(("command", "config"), [("lm.train", "tiny.py"), ("lm.sweep", "tiny_sweep.py")])
def test_a_workdir_in_an_object_store_is_refused(command, config, tmp_path, monkeypatch, capsys):
    """Otherwise a directory gs: would be made on this machine."""
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(command).main
    assert main(["--config", str(CONFIGS / config), "--workdir", "gs://bucket/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--workdir gs://bucket/run: URLs are not supported; mount the bucket as a directory")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_in_an_object_store_is_refused(train, tmp_path):
    code, output = train(tmp_path / "run", "--config.data.cache_dir=gs://bucket/cache")
    assert code == 2
    assert "config.data.cache_dir gs://bucket/cache: URLs are not supported" in output


@pytest.mark.parametrize("path", ["runs/a:b", "/runs/gs:/x", "C:/runs"])
def test_only_urls_are_refused(path):
    refuse_url(path, "--workdir")
