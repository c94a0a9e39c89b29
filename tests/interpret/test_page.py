"""The page of lm.inspect: its numbers are those of `capture`, and no text can break it."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
import shutil
import subprocess

import jax
import numpy as np
import pytest
from tiny import redrawn, tiny

from lm import model
from lm.data.hf_tokenizer import train_bpe
from lm.data.tokenizers import ByteTokenizer, CharTokenizer
from lm.interpret import capture
from lm.interpret import measure as measuring
from lm.interpret.measure import choose_layers, label, measure
from lm.interpret.page import to_html
from lm.system.errors import UserError
from lm.trained_model import TrainedModel

TOKENIZER = CharTokenizer("</script>&\n \u200bab")
TEXT = "</s>&\n\u200ba"


@pytest.fixture(scope="module")
def run():
    config = tiny(model={"vocab_size": TOKENIZER.vocab_size + 1, "norm_placement": "sandwich"})
    return TrainedModel("runs/<b>", 7, config, redrawn(config.model), TOKENIZER)


@pytest.fixture(scope="module")
def measured(run):
    return measure(run, TEXT)


@pytest.fixture(scope="module")
def captured(run):
    names = [
        "embedding",
        "*/residual",
        "*/weights",
        "*/attention_post_norm/output",
        "*/ffn_post_norm/output",
    ]
    return capture(run, run.encode(TEXT), names)


class Page(html.parser.HTMLParser):
    """The text of each element with an id, and the attributes of all elements."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.stack = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag != "meta":
            self.stack.append(self.elements[-1])

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for element in self.stack:
            element[2].append(data)

    def all(self, tag):
        return [
            (attributes, "".join(texts))
            for found, attributes, texts in self.elements
            if found == tag
        ]

    def data(self):
        (text,) = (
            text for attributes, text in self.all("script") if attributes.get("id") == "data"
        )
        return json.loads(text)


def softmax(x):
    x = np.exp(np.float64(x) - np.max(x, -1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


# --- Numbers.


def test_losses_likely_tokens_and_the_logit_lens_are_those_of_the_logits(run, measured, captured):
    p_TV, ids_T, last = (
        softmax(captured[0]),
        run.encode(TEXT),
        measured.next.p_TR[:, : measuring.N_LENS],
    )
    assert np.isnan(measured.losses_T[0])
    np.testing.assert_allclose(
        measured.losses_T[1:], -np.log(p_TV[np.arange(len(TEXT) - 1), ids_T[1:]]), rtol=1e-5
    )
    np.testing.assert_array_equal(
        measured.next.ids_TR, np.argsort(-p_TV, axis=-1)[:, : measuring.N_NEXT]
    )
    np.testing.assert_allclose(
        measured.next.p_TR, -np.sort(-p_TV)[:, : measuring.N_NEXT], rtol=1e-5
    )
    assert list(measured.lens) == ["embedding", "layer 0", "layer 1"]
    np.testing.assert_allclose(measured.lens["layer 1"].p_TR, last, rtol=1e-5)
    assert np.abs(measured.lens["layer 0"].p_TR - last).max() > 0.01


def test_a_page_of_a_loop_has_all_turns_and_of_a_block_all_branches():
    keys = {
        "vocab_size": TOKENIZER.vocab_size + 1,
        "n_layers": 3,
        "loops": 2,
        "loop_layers": (0, 2),
    }
    config = tiny(model=keys | {"branches": ("ffn*0.5", "attention", "ffn*0.5")})
    looped = TrainedModel("runs/b", 7, config, redrawn(config.model), TOKENIZER)
    m = measure(looped, TEXT)
    rows = [
        "embedding",
        "layer 0",
        "layer 1",
        "turn 1, layer 0",
        "turn 1, layer 1",
        "turn 1, layer 2",
    ]
    assert list(m.lens) == rows
    np.testing.assert_allclose(m.lens[rows[-1]].p_TR, m.next.p_TR[:, : measuring.N_LENS], rtol=1e-5)
    assert list(m.norms) == ["residual stream", "feed-forward", "attention", "feed-forward 2"]
    assert list(m.weights) == [0, 1, 2]
    titles = [text for _, text in Page(to_html(looped, m)).all("th")]
    assert titles[-len(rows) :] == rows


def test_norms_are_those_of_what_is_added_to_the_residual_stream(measured, captured):
    """In a sandwich a branch adds the output of its second norm."""
    acts = captured[1]
    for name, suffix in (
        ("attention", "attention_post_norm/output"),
        ("feed-forward", "ffn_post_norm/output"),
    ):
        expected = [
            np.sqrt((np.square(acts[f"layers/{i}/{suffix}"])).sum(-1)).mean() for i in range(2)
        ]
        np.testing.assert_allclose(measured.norms[name][1:], expected, rtol=1e-5)
    residuals = ["embedding", "layers/0/residual", "layers/1/residual"]
    expected = [np.sqrt((np.square(acts[name])).sum(-1)).mean() for name in residuals]
    np.testing.assert_allclose(measured.norms["residual stream"], expected, rtol=1e-5)


def test_the_data_of_the_page_are_the_measurements(run, measured, captured):
    page = Page(to_html(run, measured))
    data, T = page.data(), len(TEXT)
    assert "".join(run.tokenizer.decode([i]) for i in data["ids"]) == TEXT
    np.testing.assert_allclose(data["next"]["p"], measured.next.p_TR, rtol=1e-3)
    np.testing.assert_allclose(
        data["next"]["actual"][:-1], np.exp(-measured.losses_T[1:]), rtol=1e-3
    )
    assert data["next"]["actual"][-1] is None
    assert [row["name"] for row in data["lens"]] == list(measured.lens)
    np.testing.assert_array_equal(data["lens"][1]["ids"], measured.lens["layer 0"].ids_TR)
    for layer in data["attention"]:
        packed = np.frombuffer(base64.b64decode(layer["weights"]), np.uint8).reshape(
            layer["heads"], -1
        )
        weights = np.asarray(captured[1][f"layers/{layer['layer']}/attention/weights"])
        np.testing.assert_allclose(packed / 255, weights[:, *np.tril_indices(T)], atol=0.5001 / 255)
    assert [layer["layer"] for layer in data["attention"]] == [0, 1]
    used = {
        i for ranking in (data["next"], *data["lens"]) for row in ranking["ids"] for i in row
    } | set(data["ids"])
    assert {int(i) for i in data["labels"]} == used


def test_the_text_shows_each_token_and_its_loss(run, measured):
    spans = [(a, text) for a, text in Page(to_html(run, measured)).all("span") if "data-t" in a]
    assert [text for _, text in spans] == ["<", "/", "s", ">", "&", "↵", "U+200B", "a"]
    assert spans[0][0]["title"] == "position 0: not predicted"
    losses = [float(re.search(r"loss ([\d.]+)", a["title"])[1]) for a, _ in spans[1:]]
    np.testing.assert_allclose(losses, measured.losses_T[1:], atol=5e-4)
    shades = [float(a["style"].removeprefix("--shade:")) for a, _ in spans[1:]]
    uniform = np.log(run.config.model.vocab_size)
    np.testing.assert_allclose(shades, np.minimum(1, measured.losses_T[1:] / uniform), atol=5e-4)


def test_the_table_shows_the_norms(run, measured):
    cells = [text for _, text in Page(to_html(run, measured)).all("td")]
    residual, attention, ffn = (
        measured.norms[name] for name in ("residual stream", "attention", "feed-forward")
    )
    rows = [[residual[0]], *zip(residual[1:], attention[1:], ffn[1:], strict=True)]
    assert cells == [
        *(f"{x:.4g}" for x in rows[0]),
        "",
        "",
        *(f"{x:.4g}" for row in rows[1:] for x in row),
    ]


@pytest.mark.slow
def test_a_text_of_one_token_has_no_loss(run, measured):
    one = measure(run, "a")
    assert np.isnan(one.losses_T).all()
    assert one.weights[0].shape == (run.config.model.n_heads, 1, 1)
    assert "mean loss" not in to_html(run, one)
    assert "mean loss" in to_html(run, measured)


# --- Robustness.


def test_no_token_can_end_an_element_and_no_other_file_is_named(run, measured):
    hostile = "</script><script>alert('x')</script><b title=\""
    labels = dict.fromkeys(measured.labels, hostile)
    text = to_html(run, dataclasses.replace(measured, labels=labels))
    page = Page(text)
    assert len(page.all("script")) == 2
    assert page.all("b") == []
    assert set(page.data()["labels"].values()) == {hostile}
    assert page.all("h1")[0][1] == "runs/<b>, step 7"
    assert not re.search(r"https?:|\bsrc=|@import|url\(|\bimport\(|fetch\(", text)
    assert {tag for tag, _, _ in page.elements}.isdisjoint({"link", "img", "iframe", "object"})


def test_a_browser_loads_nothing_and_runs_only_the_script_of_the_page(run, measured):
    """The policy comes before all that it governs, and has the hash of the script as the browser
    computes it.
    """
    page = to_html(run, measured)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert page.index(policy) < page.index("<style")
    assert "onclick=" not in page.split("<script")[0]


def test_the_page_says_which_layers_are_left_out(run, measured):
    assert "Shown are" not in to_html(run, measured)
    some = dataclasses.replace(measured, weights={1: measured.weights[1]})
    assert "Shown are 1 of 2 layers;" in to_html(run, some)


def test_a_layer_without_attention_has_no_maps(monkeypatch):
    def mixed(here, x_BTD):
        return model.attention(here, x_BTD) if here.prototype == 1 else x_BTD

    mixer = model.MIXERS["attention"]._replace(apply=mixed)
    monkeypatch.setitem(model.MIXERS, "attention", mixer)
    config = tiny(model={"vocab_size": TOKENIZER.vocab_size, "d_ff": 20})  # of no other test
    assert list(
        measure(TrainedModel("runs/b", 7, config, redrawn(config.model), TOKENIZER), TEXT).weights
    ) == [1]


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), train_bpe(["naïve 日本 e\u0301"], 270)], ids=["byte", "bpe"]
)
def test_labels_of_all_tokens_are_printable_and_different(tokenizer):
    """This includes single bytes of a character."""
    labels = [label(tokenizer, i) for i in range(tokenizer.vocab_size + 1)]
    assert all(text and text.isprintable() and "\ufffd" not in text for text in labels)
    assert len(set(labels)) == len(labels)


def test_a_page_has_a_limited_number_of_attention_weights(monkeypatch):
    n = measuring.MAX_WEIGHTS
    assert choose_layers(None, 12, 1000) == list(range(12))
    assert choose_layers(None, 12, n // 3) == [0, 6, 11]
    assert choose_layers([5, 3, 3], 12, n // 3) == [3, 5]
    mistakes = {
        "at most 1 layers or a shorter prompt": ([0, 1], n),
        "at most 16,777,216: use a shorter prompt": (None, n + 1),
    }
    for message, (layers, n_weights) in mistakes.items():
        with pytest.raises(UserError, match=message):
            choose_layers(layers, 2, n_weights)
    # 4 maps of 8 tokens; differential attention has 8
    monkeypatch.setattr(measuring, "MAX_WEIGHTS", 4 * 8 * 9 // 2)
    config = tiny(model={"vocab_size": TOKENIZER.vocab_size, "attn_differential": True})
    with pytest.raises(UserError, match="shorter prompt"):
        measure(TrainedModel("", 0, config, {}, TOKENIZER), TEXT, layers=[1])


def test_parameters_that_cannot_be_shown_are_a_user_error(run):
    params = jax.tree.map(lambda x: x * np.nan, run.params)
    with pytest.raises(UserError, match="step 7: the logits are not finite; choose another --step"):
        measure(dataclasses.replace(run, params=params), TEXT)


@pytest.mark.slow
def test_a_browser_draws_the_page(run, measured, tmp_path):
    """Headless Chromium runs the script: the table of the logit lens has the likeliest tokens."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs Chromium")
    (tmp_path / "page.html").write_text(to_html(run, measured), encoding="utf-8")
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        "--virtual-time-budget=5000",
    ]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    n_cells = (1 + len(measured.lens)) * len(measured.ids_T)  # the table of norms follows
    cells = [text for _, text in Page(done.stdout).all("td")][:n_cells]
    rows = [measured.ids_T, *(ranking.ids_TR[:, 0] for ranking in measured.lens.values())]
    assert cells == [measured.labels[i] for row in rows for i in row.tolist()]
    assert len(Page(done.stdout).all("canvas")) == 2 * run.config.model.n_heads + 1
    assert "Layer 0, head 0: “a” (7) reads most from" in done.stdout
