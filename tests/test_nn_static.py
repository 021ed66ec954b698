"""calibrate and static activations: ranges counted by hand, layers against static fake quantization in plain torch."""

import copy
import io
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fpk
from fpk.check import assert_close, rel_error
from fpk.nn import Calibration, LayerRange, QuantizedLinear

STATIC = (
    "fp8_tensor:fp8_tensor_static", "fp8_channel:fp8_tensor_static", "fp8_block128:fp8_tensor_static",
    "int8_channel:int8_tensor_static", "int8_tensor:int8_tensor_static", "int8_group128:int8_tensor_static",
)  # fmt: skip


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Net(nn.Module):
    """Two layers, an output layer, and one that is used only on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.lm_head = nn.Linear(64, 48), nn.Linear(48, 64, bias=False), nn.Linear(64, 8)
        self.spare = nn.Linear(64, 64)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, spare: bool = False) -> Tensor:
        hidden = self.down(torch.relu(self.up(input=self.drop(x))))
        return self.lm_head(self.spare(hidden) if spare else hidden)


def net(device, dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(0)
    return Net().to(device, dtype)


def data(device, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [randn(2, 5, 64, seed=i, dtype=dtype).to(device) for i in range(count)]


def expected_ranges(model: Net, batches: list[Tensor]) -> dict[str, float]:
    with torch.no_grad():
        hidden = [torch.relu(model.up(x)) for x in batches]
    return {
        "up": max(x.float().abs().max().item() for x in batches),
        "down": max(h.float().abs().max().item() for h in hidden),
    }


def plain_scale(amax: float, scheme: str) -> Tensor:
    amax32 = torch.tensor(amax, dtype=torch.float32)
    if scheme.startswith("int8"):
        return amax32.clamp(min=1e-10) / torch.tensor(127.0)
    return torch.maximum(amax32 / torch.tensor(448.0), torch.tensor(1 / (512 * 448.0)))


def plain_codes(x: Tensor, scale: Tensor, scheme: str) -> Tensor:
    if scheme.startswith("int8"):
        return (x.float() / scale).round().clamp(-128, 127)
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()


# ---- ranges ----------------------------------------------------------------
def test_ranges_are_those_counted_by_hand(device):
    model, batches = net(device), data(device)
    found = fpk.calibrate(model, batches, ignore=["spare"])
    expected = expected_ranges(model, batches)
    assert {name: layer.amax for name, layer in found.layers.items()} == expected
    assert found.layers["up"] == LayerRange(expected["up"], 30, (48, 64)) and found.batches == 3
    assert found.layers["down"].tokens == 30


def test_batches_may_be_tensors_mappings_and_tuples(device):
    model, batches = net(device), data(device)
    first = fpk.calibrate(model, batches, ignore=["spare"])
    for kinds in ([{"x": x} for x in batches], [(x,) for x in batches], ([x] for x in batches)):
        assert fpk.calibrate(model, kinds, ignore=["spare"]) == first
    whole = fpk.calibrate(model, [(x, None, True) for x in batches], lm_head=True)
    assert set(whole.layers) == {"up", "down", "lm_head", "spare"} and whole.layers["up"] == first.layers["up"]
    only = fpk.calibrate(model, batches, filter=lambda module, name: name == "up")
    assert set(only.layers) == {"up"}


def test_nan_and_inf_do_not_count(device):
    model = net(device)
    bad = torch.ones(1, 4, 64, device=device, dtype=torch.bfloat16)
    bad[0, 0, 0], bad[0, 1, 1], bad[0, 2, 2] = math.nan, math.inf, -3
    nothing = torch.full_like(bad, math.inf)
    only_up = ["spare", "down"]
    for batches in ([bad], [nothing, bad], [bad, nothing, bad * 0.5], [torch.full_like(bad, math.nan), bad]):
        assert fpk.calibrate(model, batches, ignore=only_up).layers["up"].amax == 3.0
    assert fpk.calibrate(model, [bad * 0], ignore=["spare", "down"]).layers["up"].amax == 0.0
    for odd in (math.inf, math.nan):
        with pytest.raises(ValueError, match=r"expected finite activations, up saw only NaN and Inf"):
            fpk.calibrate(model, [torch.full_like(bad, odd)], ignore=only_up)


def test_masked_tokens_do_not_count(device):
    model, x = net(device), data(device)[0]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], device=device)
    loud = torch.where(mask[..., None] == 0, 1000.0, x)
    found = fpk.calibrate(model, [{"x": loud, "attention_mask": mask}], ignore=["spare"])
    assert found.layers["up"].amax == x[mask != 0].float().abs().max().item() and found.layers["up"].tokens == 7
    assert fpk.calibrate(model, [loud], ignore=["spare"]).layers["up"].amax == 1000.0
    flat = {"x": loud.flatten(0, 1), "attention_mask": mask}  # as layers beside experts get it
    assert fpk.calibrate(model, [flat], ignore=["spare"]).layers == found.layers


def test_the_model_stays_as_it_was(device):
    model, batches = net(device).train(), data(device)
    model.down.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = fpk.calibrate(model, batches, ignore=["spare"])
    assert first == fpk.calibrate(model, batches, ignore=["spare"])  # no dropout
    with pytest.raises(TypeError):
        fpk.calibrate(model, [{"nonsense": batches[0]}], ignore=["spare"])
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_calibrate_refuses(device):
    model, batches = net(device), data(device)
    with pytest.raises(ValueError, match=r"calibrate.batches: expected tokens for every layer, none reached spare"):
        fpk.calibrate(model, batches)
    with pytest.raises(ValueError, match=r"none reached up, down"):
        fpk.calibrate(model, [batches[0][:, :0]], ignore=["spare"])
    with pytest.raises(ValueError, match=r"calibrate.batches: expected at least one batch"):
        fpk.calibrate(model, [])
    with pytest.raises(ValueError, match=r"calibrate.batches: expected tensors, .* got str"):
        fpk.calibrate(model, ["prompt"])
    with pytest.raises(ValueError, match=r"calibrate.model: expected linear layers"):
        fpk.calibrate(model, batches, ignore=["*"])
    with pytest.raises(ValueError, match=r"calibrate.model: expected a module that holds linear layers"):
        fpk.calibrate(nn.Linear(4, 4), batches)
    with pytest.raises(ValueError, match=r"calibrate.scheme: expected static .* got fp8_channel:fp8_token"):
        fpk.calibrate(model, batches, "fp8_channel")
    fpk.calibrate(model, batches, STATIC[0], ignore=["spare"])


# ---- layers ----------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", STATIC)
def test_layers_are_static_fake_quantization(scheme, dtype, device):
    model, batches = net(device, dtype).eval(), data(device, dtype=dtype)
    ranges = expected_ranges(model, batches)
    original = copy.deepcopy(model)
    report = fpk.quantize_(model, scheme, ["spare"], calibration=fpk.calibrate(model, batches, ignore=["spare"]))
    assert {r.scheme for r in report.changed} == {scheme}
    x = 3 * batches[0].reshape(-1, 64)  # beyond the range: saturates instead of moving the scale
    scale = plain_scale(ranges["up"], scheme)
    codes = plain_codes(x.cpu(), scale, scheme)
    assert codes.abs().max() == (128 if scheme.startswith("int8") else 448)
    assert_close(model.up.input_scale.cpu(), scale.view(1, 1), 0.0)
    seen = fpk.quantize(x, scheme.partition(":")[2].removesuffix("_static"), scale=model.up.input_scale)
    assert_close(seen.codes.cpu().float(), codes, 0.0)
    weight = model.up.dequantize().double().cpu()
    expected = (codes.double() * scale.double()) @ weight.T + original.up.bias.detach().double().cpu()
    tol = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-5}[dtype]
    with torch.no_grad():
        assert rel_error(model.up(x).cpu(), expected) <= tol
        assert rel_error(model(batches[0]), original(batches[0])) <= 0.1
        quiet = 0.7 * batches[0]  # the dynamic scale follows the data; 0.7, since FP8 codes hardly feel powers of two
        dynamic = QuantizedLinear.from_linear(original.up, scheme.removesuffix("_static"))
        assert not torch.equal(model.up(quiet), dynamic(quiet))


@pytest.mark.parametrize("scheme", STATIC[1:4:2])
def test_a_layer_that_saw_only_zeros_has_the_smallest_scale(scheme, device):
    layer = QuantizedLinear.from_linear(nn.Linear(64, 48).to(device), scheme, input_amax=0.0)
    assert layer.input_scale.item() == plain_scale(0.0, scheme).item() > 0
    x = torch.zeros(2, 64, device=device)
    assert_close(layer(x), layer.bias.detach().repeat(2, 1), 0.0)


def test_given_its_own_range_a_static_layer_is_the_dynamic_one(device):
    x = randn(6, 64).to(device)
    linear = nn.Linear(64, 48).to(device, torch.bfloat16)
    for pair in ("fp8_channel:fp8_tensor", "int8_channel:int8_tensor"):
        static = QuantizedLinear.from_linear(linear, f"{pair}_static", input_amax=x.float().abs().max().item())
        assert_close(static(x), QuantizedLinear.from_linear(linear, pair)(x), 0.0)


def test_the_block_puts_layers_back(device):
    model, batches = net(device).eval(), data(device)
    calibration = fpk.calibrate(model, batches, ignore=["spare"])
    layers = dict(model.named_modules())
    with fpk.quantized(model, STATIC[0], ignore=["spare"], calibration=calibration):
        assert isinstance(model.up, QuantizedLinear) and model.up.scheme == STATIC[0]
    assert dict(model.named_modules()) == layers


def test_a_calibration_must_fit(device):
    model, batches = net(device), data(device)
    calibration = fpk.calibrate(model, batches, ignore=["spare"])
    layers = dict(model.named_modules())

    def refused(message: str, scheme: str = STATIC[0], calibration: Calibration | None = calibration) -> None:
        with pytest.raises(ValueError, match=message):
            fpk.quantize_(model, scheme, ignore=["spare"], calibration=calibration)
        assert dict(model.named_modules()) == layers

    def ranges(**changes: LayerRange | None) -> Calibration:
        changed = dict(calibration.layers) | changes
        return Calibration({n: r for n, r in changed.items() if r is not None}, 1)

    refused(r"calibration: expected one for fp8_tensor:fp8_tensor_static \(fpk.calibrate\), got None", calibration=None)
    refused(r"calibration: expected None for fp8_channel:fp8_token, got a calibration", "fp8_channel")
    refused(r"expected a range for each layer, found none for down", calibration=ranges(down=None))
    refused(r"expected layers of this model, got other", calibration=ranges(other=calibration.layers["up"]))
    refused(r"expected up of weights \(48, 64\), got \(48, 60\)", calibration=ranges(up=LayerRange(1.0, 1, (48, 60))))
    refused(r"up.input_amax: expected a finite magnitude", calibration=ranges(up=LayerRange(math.inf, 1, (48, 64))))
    many = {f"layer{i}": calibration.layers["up"] for i in range(5)}
    refused(r"got layer0, layer1, layer2 and 2 more$", calibration=ranges(**many))
    with pytest.raises(ValueError, match=r"found none for spare"):
        fpk.quantize_(model, STATIC[0], calibration=calibration)
    # ranges of layers that are left alone this time do no harm
    fpk.quantize_(model, STATIC[0], ignore=["spare", "down"], calibration=calibration)
    assert isinstance(model.up, QuantizedLinear) and isinstance(model.down, nn.Linear)


def test_layers_check_their_input_scale(device):
    weight = fpk.quantize(randn(48, 64).to(device), "fp8_channel")
    one = torch.ones(1, 1, device=device)
    assert QuantizedLinear(weight, "fp8_tensor_static", input_scale=one).scheme == "fp8_channel:fp8_tensor_static"
    for activation, scale, message in (
        ("fp8_tensor_static", None, r"input_scale: expected a tensor \(1, 1\) for .*_static, got None"),
        ("fp8_token", one, r"input_scale: expected None for fp8_channel:fp8_token, got a tensor \(1, 1\)"),
        ("fp8_tensor_static", one[0], r"input_scale: expected \(1, 1\), got \(1,\)"),
        ("fp8_tensor_static", one.half(), r"input_scale: expected float32, got float16"),
        ("fp8_tensor_static", -one, r"input_scale: expected finite positive scales, got -1.0"),
        ("int8_tensor_static", one, "no product"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedLinear(weight, activation, input_scale=scale)
    linear = nn.Linear(8, 8).to(device)
    for scheme, amax in (("fp8_channel", 1.0), (STATIC[0], None), (STATIC[0], -1.0), (STATIC[0], math.nan)):
        with pytest.raises(ValueError, match=r"proj.input_amax: expected"):
            QuantizedLinear.from_linear(linear, scheme, "proj", amax)


# ---- files, copies, compilation --------------------------------------------
def test_a_calibration_prints_and_survives_a_file(device, tmp_path):
    model = net(device)
    found = fpk.calibrate(model, data(device), ignore=["spare"])
    found.save(tmp_path / "ranges.safetensors")
    assert Calibration.load(tmp_path / "ranges.safetensors") == found
    text = str(found)
    assert "calibration: 2 layers, batches 3, up to 30 tokens" in text and "48x64" in text
    assert found._repr_html_().count("<tr>") == 3
    assert found.to_frame()["input_amax"].tolist() == [found.layers["up"].amax, found.layers["down"].amax]


def test_files_that_are_no_calibration(tmp_path):
    path = tmp_path / "file.safetensors"
    with pytest.raises(OSError):
        Calibration.load(path)
    for write in (
        lambda: path.write_bytes(b"text"),
        lambda: save_file({"weight": torch.ones(1)}, path),
        lambda: save_file({"a": torch.ones(1)}, path, {"fpk.calibration": "[]"}),
        lambda: save_file({"a": torch.ones(1)}, path, {"fpk.calibration": '{"batches": 1, "layers": {"up": {}}}'}),
    ):
        write()
        with pytest.raises(ValueError, match=r"file.safetensors: expected a calibration"):
            Calibration.load(path)
    Calibration({"up": LayerRange(math.nan, 1, (2, 2))}, 1).save(path)
    with pytest.raises(ValueError, match=r"expected a finite range for up, got nan"):
        Calibration.load(path)


def test_state_dicts_carry_the_input_scale(device):
    model, batches = net(device).eval(), data(device)
    calibration = fpk.calibrate(model, batches, ignore=["spare"])
    other = copy.deepcopy(model)
    louder = Calibration({n: LayerRange(1.5 * r.amax, r.tokens, r.shape) for n, r in calibration.layers.items()}, 1)
    fpk.quantize_(model, STATIC[1], ignore=["spare"], calibration=calibration)
    fpk.quantize_(other, STATIC[1], ignore=["spare"], calibration=louder)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["up.input_scale"].shape == (1, 1)
    with torch.no_grad():
        expected = model(batches[0])
        assert not torch.equal(other(batches[0]), expected)
        other.load_state_dict(state)
        assert_close(other(batches[0]), expected, 0.0)
        assert_close(copy.deepcopy(model)(batches[0]), expected, 0.0)
    state["up.input_scale"] = state["up.input_scale"] * 0
    with pytest.raises(RuntimeError, match=r"up.input_scale: expected finite positive scales, got 0.0"):
        other.load_state_dict(state)
    kept = model.up.input_scale.clone()
    for cast in (model.half, model.bfloat16, model.double):
        cast()
        assert_close(model.up.input_scale, kept, 0.0)


@pytest.mark.parametrize("scheme", STATIC[1:4])
def test_compiles_in_one_graph(scheme, device):
    model, batches = net(device).eval(), data(device)
    calibration = fpk.calibrate(model, batches, ignore=["spare"])
    fpk.quantize_(model, scheme, ignore=["spare"], calibration=calibration)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for x in (batches[0], batches[1][0]):
            assert_close(compiled(x), model(x), 0.0)
