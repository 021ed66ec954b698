"""The life of a layer: loading again into its storage, copies, pickles, moves, and the memory that loading takes."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from linear_kit import DEVICE, default_device, loaded, random_weight, random_x
from torch.utils._python_dispatch import TorchDispatchMode

import fpk.op
from fpk.check import assert_close, bits
from fpk.device import pretend
from fpk.formats import E4M3FN, encode
from fpk.methods import (
    Fp8Config,
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
    Int8PtpcOnlineLinearMethod,
    Linear,
    load_dummy_weights,
)

pytestmark = pytest.mark.usefixtures("references")

K, WIDTHS = 160, (96, 32, 64)
ONLINE = {
    m.__name__: m
    for m in (
        Fp8PerBlockOnlineLinearMethod,
        Fp8PerTensorOnlineLinearMethod,
        Fp8PtpcOnlineLinearMethod,
        Int8PtpcOnlineLinearMethod,
    )
}
SERIALIZED = {
    "tensor": dict(),
    "static": dict(activation_scheme="static"),
    "block": dict(weight_block_size=[32, 64]),
    "block_refined": dict(weight_block_size=[128, 128]),
}
every_kind = pytest.mark.parametrize("kind", [*ONLINE, *SERIALIZED])


def make(kind: str) -> Linear:
    if kind in ONLINE:
        return Linear(K, WIDTHS, bias=True, quant_method=ONLINE[kind](), prefix="p.qkv_proj")
    config = Fp8Config(is_checkpoint_fp8_serialized=True, **SERIALIZED[kind])
    return Linear(K, WIDTHS, bias=True, quant_config=config, prefix="p.qkv_proj")


def load(layer: Linear, seed: int) -> Linear:
    """Through the loaders that the layer's parameters have now, as an engine does it."""
    generator = torch.Generator().manual_seed(seed)

    def put(name, value, shard=None):
        parameter = dict(layer.named_parameters())[name]
        parameter.weight_loader(parameter, value.to(default_device()), shard)

    for shard, n in zip("qkv", WIDTHS, strict=True):
        weight = torch.randn(n, K, generator=generator, device="cpu")
        if isinstance(layer.quant_method, tuple(ONLINE.values())):
            put("weight", weight.bfloat16(), shard)
            continue
        put("weight", encode(weight * 100, E4M3FN).view(torch.float8_e4m3fn), shard)
        if layer.weight_block_size is None:
            put("weight_scale", torch.rand((), generator=generator, device="cpu") + 0.5, shard)
        else:
            rows, columns = layer.weight_block_size
            shape = (-(-n // rows), -(-K // columns))
            put("weight_scale_inv", torch.rand(shape, generator=generator, device="cpu") + 0.5, shard)
        if layer.quant_method.is_static:
            put("input_scale", torch.rand((), generator=generator, device="cpu") + 0.5, shard)
    put("bias", torch.randn(sum(WIDTHS), generator=generator, device="cpu").bfloat16())
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def same(a: Linear, b: Linear) -> None:
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_close(ours[name].data, theirs[name].data, 0.0, name)
    assert_close(a.dequantize(), b.dequantize(), 0.0)
    assert (a.input_scale is None) == (b.input_scale is None)


@every_kind
def test_loading_again_ends_in_the_same_storage(kind):
    layer = load(make(kind), seed=1)
    pointers = {n: p.data_ptr() for n, p in layer.named_parameters()}
    for seed in (2, 3):
        load(layer, seed)
        assert pointers == {n: p.data_ptr() for n, p in layer.named_parameters()}
        same(layer, load(make(kind), seed))


@every_kind
def test_a_second_load_without_one_shard_is_refused(kind):
    """The codes of that shard would be those of before under the new scales."""
    layer = load(make(kind), seed=1)
    for name in [n for n in ("weight", "weight_scale", "weight_scale_inv", "input_scale") if n in layer._parameters]:
        parameter = layer._parameters[name]
        if parameter is None or (kind in ONLINE and name != "weight"):
            continue
        for i, (shard, n) in enumerate(zip("qkv", WIDTHS, strict=True)):
            if name == "weight" and kind in ONLINE:
                value = random_weight(n, K)
            elif name == "weight":
                value = encode(random_weight(n, K), E4M3FN).view(torch.float8_e4m3fn)
            elif name == "weight_scale_inv":
                rows, columns = layer.weight_block_size
                value = torch.full((-(-n // rows), -(-K // columns)), 0.5)
            else:
                value = torch.tensor(0.5 + i)
            if (name, shard) != ("weight", "k"):
                parameter.weight_loader(parameter, value.to(default_device()), shard)
    with pytest.raises(ValueError, match=r"p\.qkv_proj\.weight: expected"):
        layer.quant_method.process_weights_after_loading(layer)


@every_kind
def test_a_copy_is_a_layer_of_its_own(kind):
    layer = load(make(kind), seed=1)
    other = copy.deepcopy(layer)
    same(other, layer)
    load(other, seed=2)  # its loaders fill the copy
    same(other, load(make(kind), seed=2))
    same(layer, load(make(kind), seed=1))


@every_kind
@pytest.mark.parametrize("how", ("pickle", "torch.save"))
def test_pickles_come_back_with_their_loaders(kind, how):
    layer = load(make(kind), seed=1)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    same(other, layer)
    load(other, seed=2)
    same(other, load(make(kind), seed=2))
    same(layer, load(make(kind), seed=1))


@every_kind
def test_an_unloaded_copy_can_be_loaded(kind):
    for other in (copy.deepcopy(make(kind)), pickle.loads(pickle.dumps(make(kind)))):
        same(load(other, seed=1), load(make(kind), seed=1))


@every_kind
def test_a_conversion_leaves_codes_and_scales(kind):
    layer = load(make(kind), seed=1)
    half = copy.deepcopy(layer).half()
    assert half.bias.dtype is torch.float16
    half.bias = layer.bias
    same(half, layer)
    same(load(layer.to(DEVICE).float().bfloat16(), seed=2), load(make(kind), seed=2))


@every_kind
def test_state_dicts_round_trip(kind):
    source, target = load(make(kind), seed=1), load(make(kind), seed=2)
    state = {n: v.clone() for n, v in source.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert not target.load_state_dict(torch.load(buffer)).missing_keys
    same(target, source)


@every_kind
def test_a_processed_state_loads_into_a_new_layer(kind):
    source = load(make(kind), seed=1)
    other = make(kind)
    assert not other.load_state_dict(source.state_dict()).missing_keys
    other.quant_method.process_weights_after_loading(other)
    same(other, source)
    same(load(other, seed=2), load(make(kind), seed=2))


@pytest.mark.parametrize("kind", ["tensor", "static", "block"])
def test_the_state_of_another_gpu_s_format_is_not_converted(kind, on_cpu):
    with pretend("gfx942"):
        source = load(make(kind), seed=1)
        other = make(kind)
        other.load_state_dict(source.state_dict())
        other.quant_method.process_weights_after_loading(other)
        same(other, source)


@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_codes_without_their_scales_are_not_a_reload(kind):
    layer = load(make(kind), seed=1)
    layer.weight.weight_loader(layer.weight, torch.zeros(96, K).to(torch.float8_e4m3fn), "q")
    with pytest.raises(ValueError, match=r"p\.qkv_proj\.weight_scale(_inv)?: missing, expected it to be loaded again"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", ONLINE)
def test_half_a_reload_is_refused(kind):
    layer = load(make(kind), seed=1)
    layer.weight.weight_loader(layer.weight, random_weight(96, K), "q")
    with pytest.raises(ValueError, match=r"p\.qkv_proj\.weight: expected 30720 elements to be loaded, got 15360"):
        layer.quant_method.process_weights_after_loading(layer)
    same(layer, load(make(kind), seed=1))  # what it had it still has


def test_layers_are_freed_without_the_garbage_collector():
    layer = load(make("Fp8PtpcOnlineLinearMethod"), seed=1)
    alive = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert alive() is None
    finally:
        gc.enable()


class Live(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage) -> None:
        key = storage._cdata
        if key in self.sizes or not storage.nbytes():
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@pytest.mark.parametrize("kind", ONLINE)
def test_loading_needs_the_quantized_model_and_one_layer(kind, monkeypatch, on_cpu):
    monkeypatch.undo()  # the suite's guarded memory keeps allocations alive
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    n, k, count = 256, 512, 24
    layer_bytes = n * k * 2
    source = random_weight(n, k)

    def peak(count: int) -> tuple[int, int]:
        with Live() as live:
            layers = [Linear(k, [n // 2, n // 2], quant_method=ONLINE[kind]()) for _ in range(count)]
            assert live.now < layer_bytes  # nothing is there before it is loaded
            for layer in layers:
                for i, part in enumerate((source[: n // 2], source[n // 2 :])):
                    layer.weight.weight_loader(layer.weight, part, i)
                layer.quant_method.process_weights_after_loading(layer)
            return live.peak, sum(p.nbytes for layer in layers for p in layer.parameters())

    base, one = peak(1)
    most, all_of_them = peak(count)
    # what a layer needs while it is quantized does not add up over layers: only its codes and scales stay
    assert most <= base + (all_of_them - one) + layer_bytes // 8
    assert all_of_them < 0.52 * count * layer_bytes


@every_kind
@pytest.mark.parametrize("when", ("before loading", "after processing"))
def test_a_moved_layer_lives_where_it_is(kind, when):
    with torch.device("cpu"):
        layer = make(kind)
        if when == "after processing":
            load(layer, seed=2)
    layer.to(DEVICE)
    load(layer, seed=1)
    assert all(p.device == default_device() for p in layer.parameters())
    same(layer, load(make(kind), seed=1))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@every_kind
def test_a_captured_graph_sees_reloaded_weights(kind):
    layer, x = load(make(kind), seed=1), random_x(4, K)
    layer(x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for seed in (1, 2):
        load(layer, seed)
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, load(make(kind), seed)(x), 0.0)


def test_dummy_weights_fill_what_has_none():
    model = torch.nn.ModuleList([make(kind) for kind in [*ONLINE, "tensor"]])
    loaded_one = load(make("Fp8PtpcOnlineLinearMethod"), seed=1)
    model.append(loaded_one)
    assert load_dummy_weights(model, bound=0.5) == len(ONLINE)
    for layer in list(model)[: len(ONLINE)]:
        values = layer.dequantize()
        assert 0.45 < values.abs().max() <= 0.52 and values.std() > 0.2
        layer.quant_method.process_weights_after_loading(layer)
    same(loaded_one, load(make("Fp8PtpcOnlineLinearMethod"), seed=1))
    assert load_dummy_weights(model) == 0
    same(load(model[0], seed=2), load(make(next(iter(ONLINE))), seed=2))  # real weights may follow


def test_loads_in_any_order_of_layers():
    a, b = make("Fp8PtpcOnlineLinearMethod"), make("Fp8PtpcOnlineLinearMethod")
    parts = [random_weight(n, K, seed=n) for n in WIDTHS]
    for i in (2, 0, 1):
        for layer in (a, b):
            layer.weight.weight_loader(layer.weight, parts[i], i)
    right = loaded(make("Fp8PtpcOnlineLinearMethod"), parts)
    for layer in (a, b):
        assert torch.equal(bits(layer.weight), bits(right.weight))
