"""Regular expressions of a checkpoint: Python's answers, and none that takes forever."""

import random
import re
import time

import pytest
from torch import nn

import fpk
from fpk.methods import _expressions
from fpk.methods._expressions import expression
from fpk.methods._families import dialect_of
from fpk.methods.online_config import OnlineConfig
from fpk.methods.skip import is_layer_skipped

SLOW = [  # a backtracking matcher takes ages to find that none of them matches
    "(a+)+b", "(a|a)*b", "((a*)*)*b", "(a|aa|aaa)+b", "a?" * 40 + "a" * 40 + "b", ".*" * 9 + "b", "a*(?!(a+)+c)b",
    "((?=.*.*.*b)a)*b", ".*(?=" * 9 + "a" + ")" * 9 + "b", ".*(?!.*(?=" * 3 + "c" + "))" * 3 + "b",
    r"(?:\w+\w+)*b", "(?:(?:(?:a{9}){9}){9})*b", "((((a?){9}){9}){9}){9}b", "a*(?<=(?:a|a)(?:a|a))b",
]  # fmt: skip
NAME = "a" * 60


def any_expression(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(12) if depth else 0
    if kind < 4:
        return rng.choice(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\.", r"\w", "^", "$", r"\b", "c", r"\B"])
    if kind < 7:
        return any_expression(rng, depth - 1) + any_expression(rng, depth - 1)
    if kind == 7:
        return f"(?:{any_expression(rng, depth - 1)}|{any_expression(rng, depth - 1)})"
    if kind == 8:
        repeat = rng.choice(["*", "+", "?", "{2}", "{1,3}", "*?", "+?", "{,2}", "??"])
        return f"({any_expression(rng, depth - 1)}){repeat}"
    if kind == 9:
        return f"(?{rng.choice('=!')}{any_expression(rng, depth - 1)})"
    return rng.choice(["a*", "b+", ".*", ".*?", "a?", "(?<=a)", "(?<![ab])"])


@pytest.mark.parametrize("few", [-1, _expressions.FEW])
def test_answers_are_pythons(few, monkeypatch):
    """-1: every expression is followed along all ways."""
    monkeypatch.setattr(_expressions, "FEW", few)
    _expressions._matcher.cache_clear()
    rng, tried = random.Random(few), 0
    while tried < 1000:
        text = rng.choice(["", "", "", "(?i)"]) + any_expression(rng, 5)
        try:
            python = re.compile(text)
        except re.error:
            continue
        ours = expression("ignore", text)
        for _ in range(4):
            name = "".join(rng.choice("abcAB.1\n") for _ in range(rng.randrange(9)))
            assert ours(name) == (python.match(name) is not None), (text, name)
            tried += 1
    _expressions._matcher.cache_clear()


def test_long_names_are_not_left_to_python():
    """Three parts that match anything: Python's matcher would need the cube of the length."""
    start = time.process_time()
    assert not expression("ignore", "a*a*a*b")("a" * 20_000)
    assert time.process_time() - start < 1
    with pytest.raises(
        ValueError, match=r"^ignore: expected .* \(more than 500000 steps for a name of 90000 characters"
    ):
        expression("ignore", "a*a*a*a*a*a*b")("a" * 90_000)


@pytest.mark.parametrize("text", SLOW)
def test_no_expression_takes_long(text):
    start = time.process_time()
    assert not expression("ignore", text)(NAME)
    assert expression("ignore", text.removesuffix("b"))(NAME)
    assert time.process_time() - start < 1


def test_everyone_who_reads_expressions_is_quick():
    start = time.process_time()
    weights = dict(num_bits=8, type="float", strategy="channel")
    groups = dict(g=dict(targets=["re:(a+)+b", "Linear"], weights=weights, input_activations=None))
    tensors = dict(quant_method="compressed-tensors", format="float-quantized", config_groups=groups)
    block = dict(quant_method="fp8", activation_scheme="dynamic")
    for config in (tensors | {"ignore": ["re:(a|a)*b"]}, block | {"ignored_layers": ["re:((a*)*)*b"]}):
        assert dialect_of(config).spec(NAME) is not None
    assert not is_layer_skipped(NAME, ["re:(a+)+b", "re:.*.*.*.*.*.*.*.*b"])
    assert OnlineConfig("fp8_per_tensor", ignore=["re:(a+)+b"]).scheme(NAME) is not None
    fpk.quantize_(nn.ModuleDict({NAME: nn.Linear(16, 16, bias=False)}), "fp8_tensor", ignore=["re:(a+)+b"])
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "text", ["(", "[", "a{99999999999999}", r"(a)\1*.*.*.*b", "(?>a+)+b", "x" * 2001, "(?:" * 60 + ")*" * 60]
)
def test_what_cannot_be_followed_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"^some\.list: expected a regular expression, got 're:"):
        expression("some.list", text)
