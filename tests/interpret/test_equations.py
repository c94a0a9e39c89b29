"""The printed equations are those of the traced program, whatever the config turns on."""

import ast
import re

import jax
import pytest
from running import ROOT
from test_ideas import PAIRS, VARIANTS
from tiny import tiny

from lm import parameters
from lm.command_line.loading import load
from lm.interpret.equations import Trace, equations

# Keys of the model besides ideas, and values that only a number or a name in the page shows.
PLAIN = {
    "default": {},
    **{place: {"norm_placement": place} for place in ("post", "sandwich", "output", "none")},
    "parallel": {"norm_placement": "parallel"},
    "LayerNorm, biases, learned positions, tied": {
        "norm": "layer",
        "attn_bias": True,
        "ffn": "mlp",
        "ffn_bias": True,
        "positions": "learned",
        "tie_embeddings": True,
    },
    "GELU": {"activation": "gelu"},
    "GELU of experts": {"activation": "gelu", "ffn": "moe", "n_experts": 4},
    "a bias of the head": {"head_bias": True},
    "softcap": {"attn_softcap": 2.0, "logit_softcap": 3.0},
    "another softcap": {"attn_softcap": 2.5, "logit_softcap": 3.0},
    "norms of queries": {"qk_norm": True},
    "norms of all queries": {"qk_norm": True, "qk_norm_over": "all_heads"},
    "window": {"window_pattern": (0, 3)},
    "another window": {"window_pattern": (0, 4)},
    "dropout": {"dropout": 0.1},
    "theta": {"rope_theta": 50.0},
    "eps": {"norm_eps": 1e-3},
    "muP": {"parametrization": "mup", "mup_base_d_head": 8, "mup_base_d_model": 8},
    "three layers": {"n_layers": 3},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "looped": {"loops": 2},
    "looped in part": {"loops": 3, "loop_layers": (1, 2)},
    "macaron": {"branches": ("ffn*0.5", "attention", "ffn*0.5")},
}
MODELS = PLAIN | {name: row.keys for name, row in VARIANTS.items()}
FAST = PLAIN | {f"pairs {i}": PAIRS[i] for i in (0, 2, 6)}
CASES = [pytest.param(keys, id=name) for name, keys in FAST.items()]
CASES += [pytest.param(row.keys, id=name, marks=pytest.mark.slow) for name, row in VARIANTS.items()]
CASES += [
    pytest.param(keys, id=f"pairs {i}", marks=pytest.mark.slow)
    for i, keys in enumerate(PAIRS)
    if i not in (0, 2, 6)
]
PRODUCTS = ("dot_general", "ragged_dot_general")


def n_products(program) -> int:
    """Return the number of products of a program, those in loops and functions included."""
    n = 0
    for eqn in program.eqns:
        n += eqn.primitive.name in PRODUCTS
        for leaf in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(leaf, "jaxpr", leaf)
            n += n_products(inner) if hasattr(inner, "eqns") else 0
    return n


@pytest.mark.parametrize("keys", CASES)
def test_each_product_and_each_parameter_is_on_a_line_and_names_tell_shapes(keys):
    config = tiny(model=keys)
    trace, page = Trace(config), equations(config)
    lines = list(trace.root.all())
    of_lines = sum(line.operations.count(name) for line in lines for name in PRODUCTS)
    assert of_lines == n_products(trace.program) > 0
    # what is not on a line of the source would not be printed
    assert not [line for line in lines if line.operations and not hasattr(line.source, "file")]
    comments = " ".join(re.sub(r"\n *# ", " ", page).split())
    for path, p in trace.table.items():
        shape = p.of_one_layer().shape
        assert f" {path.removeprefix('layers/')} {shape}" in comments, path
    header = dict(re.findall(r"(\w) (\d+)", page.splitlines()[0]))
    lengths = {letter: int(n) for letter, n in header.items() if letter in "BTDHGKFVE"}
    # name_BTDH = ...  # (4, 8, 16, 4): the letters of a name are the axes of its shape
    named = re.findall(r"^ *\w+_(BT[A-Z]+) = .*  # (\([\d, ]*\))", page, re.MULTILINE)
    assert named
    for letters, shape in named:
        for letter, n in zip(letters, ast.literal_eval(shape), strict=True):
            assert n in (1, lengths.get(letter, n)), (letters, shape)


def test_models_that_differ_print_different_equations():
    pages = {name: equations(tiny(model=keys)) for name, keys in MODELS.items()}
    name = "gated delta in three of four layers"
    pages[name] = equations(tiny(model=MODELS[name] | {"n_layers": 4}))
    pages["z_loss"] = equations(tiny(train={"z_loss": 0.1}))
    experts = MODELS["experts"] | {"moe_balance": 0.5}
    pages["another weight of a term of the loss"] = equations(tiny(model=experts))
    same = [(a, b) for a in pages for b in pages if a < b and pages[a] == pages[b]]
    assert not same


def test_equal_layers_are_printed_once_however_they_are_run():
    page = equations(tiny(model={"n_layers": 5, "window_pattern": (0, 3)}))
    titles = [row.strip() for row in page.splitlines() if row.strip().startswith("layers ")]
    assert titles == ["layers 0, 2, 4:", "layers 1, 3:"]
    assert page.count('x = x + f(norm(f"{name}_norm", x))') == 2 * len(titles)  # two branches
    unrolled, scanned = (
        equations(tiny(model={"n_layers": 4, "scan_layers": scan, "remat": remat}))
        for scan, remat in ((False, "none"), (True, "block"))
    )
    assert unrolled == scanned


def test_the_page_in_the_guide_is_that_of_the_present_code():
    config = load(str(ROOT / "configs" / "shakespeare.py"), ["model.vocab_size=65"])
    page = equations(parameters.resolve(config, 65)).strip()
    guide = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    command = "python3 -m lm.train --config configs/shakespeare.py --config.model.vocab_size=65"
    assert f"{command} --print_model" in guide
    assert f"```\n{page}\n```" in guide, "run the command and replace its output in the guide"
