"""Schemes of tensors and of layers by name."""

import pytest

import fpk
from fpk.api import LayerScheme, parse_layer_scheme, static_schemes
from fpk.formats import SCHEMES


def test_every_scheme_names_an_op_and_its_activations():
    assert fpk.list_schemes() == list(SCHEMES)
    for scheme in SCHEMES.values():
        assert scheme.quantizer in fpk.OPS, scheme.name
        if not scheme.activation:
            with pytest.raises(ValueError, match="no product as weights"):
                parse_layer_scheme(scheme.name)
            continue
        pair = parse_layer_scheme(scheme.name)
        assert pair.weight is scheme
        assert str(parse_layer_scheme(str(pair))) == str(pair)


def test_layer_schemes():
    assert parse_layer_scheme("fp8_channel") == LayerScheme(SCHEMES["fp8_channel"], SCHEMES["fp8_token"])
    assert parse_layer_scheme("fp8_tensor") == LayerScheme(SCHEMES["fp8_tensor"], SCHEMES["fp8_token"])
    assert parse_layer_scheme("fp8_tensor : fp8_tensor").activation is SCHEMES["fp8_tensor"]
    assert parse_layer_scheme("int8_channel:none") == LayerScheme(SCHEMES["int8_channel"], None)
    assert str(parse_layer_scheme("int8_channel")) == "int8_channel:int8_token"
    assert parse_layer_scheme("fp8_channel:fp8_tensor_static") == LayerScheme(
        SCHEMES["fp8_channel"], SCHEMES["fp8_tensor"], static=True
    )
    assert static_schemes() == ["fp8_tensor_static", "int8_tensor_static", "nvfp4_static"]
    for static in static_schemes():
        assert str(parse_layer_scheme(f"{static.removesuffix('_static')}:{static}")).endswith(f":{static}")
    for text, message in (
        ("fp8_chanel", "got 'fp8_chanel'"),
        ("fp8_channel:", "got ''"),
        ("fp8_channel:fp8", "got 'fp8'"),
        ("none", "got 'none'"),
        ("fp8_channel:int8_token", "int8_token activations have no product with fp8_channel weights"),
        ("int8_channel:fp8_token", "fp8_token activations have no product with int8_channel weights"),
        ("int8_channel:fp8_tensor_static", "fp8_tensor activations have no product with int8_channel weights"),
        ("fp8_channel:fp8_token_static", "int8_tensor_static or nvfp4_static, got fp8_token_static"),
        ("int8_channel:int8_tensor_asymmetric_static", "expected static activations"),
        ("fp8_tensor_static", "got 'fp8_tensor_static'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_layer_scheme(text)
