"""Every method with each of its schemes: does it load, is it right, captured, compiled whole, loaded again in place?

`python tests/methods/method_table.py OUT.csv` fills the columns on the GPU at hand; the test does what a CPU can.
"""

import csv
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fpk
from fpk import methods
from fpk.check import bits, rel_error
from fpk.formats import E4M3FN, INT8, encode
from fpk.methods import Fp8Config, Linear, MoEConfig, RoutedExperts
from fpk.methods._families import LayerSpec

COLUMNS = ("method", "scheme", "loads", "matches", "graph", "fullgraph", "reload")
T, E, TOP_K = 12, 4, 2
SIZES = dict(H=256, I=256)


def q(dtype: str, qscheme: str = "per_tensor", dynamic: bool = False, **more: Any) -> dict[str, Any]:
    """A spec as Quark writes it."""
    return dict(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, **more)


def mx(dtype: str, dynamic: bool = True) -> dict[str, Any]:
    return q(dtype, "per_group", dynamic, group_size=32, scale_format="e8m0")


def serialized(**fields: Any) -> Fp8Config:
    return Fp8Config(is_checkpoint_fp8_serialized=True, **fields)


BLOCK = dict(weight_block_size=[128, 128])
LINEAR: dict[str, list[Callable[[], Any]]] = {
    "Fp8LinearMethod": [
        lambda: methods.Fp8LinearMethod(serialized()),
        lambda: methods.Fp8LinearMethod(serialized(activation_scheme="static")),
        lambda: methods.Fp8LinearMethod(serialized(**BLOCK)),
    ],
    "SchemeLinearMethod": [
        lambda spec=spec: methods.SchemeLinearMethod(LayerSpec(*spec), "quark")
        for spec in (
            ("fp8_channel", "fp8_token"),
            ("int8_channel", "int8_token"),
            ("int8_tensor", "int8_tensor_static"),
            ("mxfp4", "mxfp4"),
            ("mxfp4", None),
            ("mxfp4", "fp8_tensor_static"),
            ("mxfp6_e2m3", "mxfp6_e2m3"),
            ("mxfp6_e3m2", None),
            ("mxfp8_e4m3", "mxfp8_e4m3"),
            ("nvfp4", "nvfp4_static"),
            ("nvfp4", None),
        )
    ],
    "UnquantizedLinearMethod": [methods.UnquantizedLinearMethod],
    **{name: [getattr(methods, name)] for name in sorted(methods.__all__) if name.endswith("OnlineLinearMethod")},
}
FP4, FP6, FP6B = "fp4", "fp6_e3m2", "fp6_e2m3"
OCP = [
    (FP4, None), (FP4, mx(FP4)), (FP4, mx(FP6)), (FP4, mx(FP6B)), (FP4, q("fp8_e4m3")),
    (FP4, q("fp8_e4m3", dynamic=True)), (FP4, mx("fp8_e4m3")),
    (FP6, None), (FP6, mx(FP6)), (FP6, q("fp8_e4m3")), (FP6, mx("fp8_e4m3")),
    (FP6B, None), (FP6B, mx(FP6B)), (FP6B, q("fp8_e4m3")), (FP6B, mx("fp8_e4m3")),
    ("fp8_e4m3", mx("fp8_e4m3")),
]  # fmt: skip
NVFP4 = [q(FP4, "per_group", True, group_size=16), q("fp8_e4m3")]


def _moe(name: str, *arguments: Any) -> Callable[[Any], Any]:
    return lambda layer: getattr(methods, name)(*arguments, layer.moe_config)


EXPERTS: dict[str, list[Callable[[Any], Any]]] = {
    "Fp8MoEMethod": [
        lambda layer: methods.Fp8MoEMethod(serialized(), layer),
        lambda layer: methods.Fp8MoEMethod(serialized(activation_scheme="static"), layer),
        lambda layer: methods.Fp8MoEMethod(serialized(**BLOCK), layer),
    ],
    "UnquantizedFusedMoEMethod": [_moe("UnquantizedFusedMoEMethod")],
    **{
        name: [lambda layer, name=name: getattr(methods, name)(layer=layer)]
        for name in sorted(methods.__all__)
        if name.endswith("OnlineMoEMethod")
    },
    "QuarkW8A8Fp8MoEMethod": [
        _moe("QuarkW8A8Fp8MoEMethod", q("fp8_e4m3"), q("fp8_e4m3")),
        _moe("QuarkW8A8Fp8MoEMethod", q("fp8_e4m3", "per_channel"), q("fp8_e4m3", "per_channel", True)),
    ],
    "QuarkW8A8Int8MoEMethod": [
        _moe("QuarkW8A8Int8MoEMethod", q("int8", w), q("int8", a, dynamic))
        for w in ("per_tensor", "per_channel")
        for a, dynamic in (("per_tensor", False), ("per_channel", True))
    ],
    "QuarkW4A8Fp8MoEMethod": [_moe("QuarkW4A8Fp8MoEMethod", [], q("fp8_e4m3", dynamic=True))],
    "QuarkOCP_MX_MoEMethod": [_moe("QuarkOCP_MX_MoEMethod", mx(w, False), a) for w, a in OCP],
    "QuarkNvfp4MoEMethod": [_moe("QuarkNvfp4MoEMethod", NVFP4, NVFP4), _moe("QuarkNvfp4MoEMethod", NVFP4, None)],
    "Mxfp4MoEMethod": [_moe("Mxfp4MoEMethod")],
}


@dataclass
class Case:
    method: str
    index: int
    experts: bool

    def make(self) -> Any:
        """The layer, its parameters created."""
        H, I = SIZES["H"], SIZES["I"]
        if not self.experts:
            return Linear(H, [I, I], quant_method=LINEAR[self.method][self.index](), prefix="p.gate_up_proj")
        oss = self.method == "Mxfp4MoEMethod"
        moe = MoEConfig(E, TOP_K, H, I, has_bias=True)
        more = dict(activation="swigluoai", swiglu_limit=7.0) if oss else {}
        layer = RoutedExperts(moe, prefix="p.experts", **more)
        layer.quant_method = EXPERTS[self.method][self.index](layer)
        layer.quant_method.create_weights(layer, E, H, I, torch.bfloat16)
        return layer

    def load(self, layer: Any, seed: int) -> Any:
        """A checkpoint of random codes and scales through the loaders that the parameters have now."""
        device = torch.empty(0).device
        for name, parameter in list(layer.named_parameters()):
            if not hasattr(parameter, "weight_loader"):
                continue  # made by the method
            shape, dtype = self.form(layer, name, parameter)
            value = content(name, shape, dtype, zlib.crc32(f"{seed} {name}".encode()))
            if value is None:
                continue
            if not self.experts and len(shape) == 1 and "scale" in name:
                for shard in range(shape[0]):
                    parameter.weight_loader(parameter, value[shard].to(device), shard)
            else:
                parameter.weight_loader(parameter, value.to(device))
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    @staticmethod
    def form(layer: Any, name: str, parameter: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Of the parameter on disk."""
        loading = layer.loading
        if name in getattr(loading, "templates", {}):
            template = loading.templates[name]
            return tuple(template.shape), template.dtype
        if name in getattr(loading, "forms", {}):
            return tuple(loading.forms[name][0]), loading.forms[name][1]
        return tuple(parameter.shape), parameter.dtype

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(T, SIZES["H"], generator=generator, device="cpu").bfloat16()
        weights, ids = torch.randn(T, E, generator=generator, device="cpu").softmax(-1).topk(TOP_K)
        device = torch.empty(0).device
        if not self.experts:
            return (x.to(device),)
        return x.to(device), weights.to(device), ids.to(device, torch.int32)

    def call(self, layer: Any, *inputs: Tensor) -> Tensor:
        return layer.quant_method.apply(layer, *inputs)

    def reference(self, layer: Any, *inputs: Tensor) -> Tensor:
        """Plain torch on the layer's own values, activations rounded by the ops' references."""
        x = inputs[0]
        if not self.experts:
            act = layer.quant_method.scheme(layer).partition(":")[2] or "none"
            scale = getattr(layer, "static_scale", getattr(layer, "input_scale", None))
            fake = rounder(act, None if scale is None else scale.view(1, 1))
            return (fake(x) @ layer.dequantize().T).to(x.dtype)
        found = layer.quant_method.get_fused_moe_quant_config(layer)
        w13, w2 = layer.quant_method.dequantize(layer)
        _, weights, ids = inputs
        H = x.shape[1]
        w13, w2 = w13[:, :, :H], w2[:, :H]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in range(E):
            slot, rank = (ids == e).nonzero(as_tuple=True)
            if not len(slot):
                continue
            scales = (s[e] if s is not None and s.dim() == 3 else s for s in (found.input_scale13, found.input_scale2))
            fake13, fake2 = (rounder(found.act, s) for s in scales)
            hidden = (fake13(x[slot]) @ w13[e].T + found.bias13[e].float()).to(x.dtype).float()
            gate, up = (hidden[:, 0::2], hidden[:, 1::2]) if layer.activation == "swigluoai" else hidden.chunk(2, 1)
            if layer.activation == "swigluoai":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                hidden = torch.nn.functional.silu(gate) * up
            y = (fake2(hidden.to(x.dtype)) @ w2[e].T + found.bias2[e, :H].float()).to(x.dtype).float()
            out.index_add_(0, slot, y * weights[slot, rank, None])
        return out.to(x.dtype)


def rounder(act: str, scale: Tensor | None) -> Callable[[Tensor], Tensor]:
    act = act.removesuffix("_static")
    if act == "none":
        return lambda x: x.float()
    if act == "nvfp4":
        given = dict(per_token=True) if scale is None else dict(global_scale=scale)
        return lambda x: fpk.quantize(x.contiguous(), act, **given).dequantize()
    return lambda x: fpk.quantize(x.contiguous(), act, scale=scale).dequantize()


def content(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor | None:
    """Random values of a parameter, by what it is."""
    generator = torch.Generator().manual_seed(seed)

    def randn() -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    def positive() -> Tensor:
        return torch.rand(shape, generator=generator, device="cpu") + 0.5

    if "zero_point" in name:
        return None  # symmetric
    if name.endswith("bias"):
        return (randn() / 8).to(dtype)
    if "input_scale" in name:
        return positive() / (2000 if "scale_2" in name else 50)
    if "weight_scale" in name:
        if dtype is torch.uint8:
            return torch.randint(119, 123, shape, generator=generator, device="cpu").to(torch.uint8)
        if dtype is torch.float8_e4m3fn:
            return positive().to(dtype)
        return positive() / (50 if "scale_2" in name else 500)
    if dtype is torch.float8_e4m3fn:
        return encode(randn() * (4 if "mx" in name else 30), E4M3FN).view(dtype)
    if dtype is torch.int8:
        return encode(randn() * 40, INT8)
    if dtype.is_floating_point:
        return (randn() / 16).to(dtype)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, device="cpu")
    return raw.to(torch.uint8).view(dtype)


def cases() -> list[Case]:
    made = [Case(name, i, False) for name, makes in LINEAR.items() for i in range(len(makes))]
    return made + [Case(name, i, True) for name, makes in EXPERTS.items() for i in range(len(makes))]


def scheme_of(case: Case, layer: Any) -> str:
    return layer.quant_method.scheme(layer)


def row(case: Case, gpu: bool, compiled: bool = True) -> dict[str, str]:
    """A row of the table: "yes", what went wrong, or "" where this device cannot tell, or is not asked to compile."""
    made: dict[str, str] = dict.fromkeys(COLUMNS, "")
    made["method"] = case.method
    layer, inputs = None, ()

    def step(name: str, work: Callable[[], str]) -> bool:
        try:
            made[name] = work()
        except Exception as error:
            traceback.print_exc()
            made[name] = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        return made[name] == "yes"

    def loads() -> str:
        nonlocal layer, inputs
        layer, inputs = case.load(case.make(), 1), case.inputs()
        made["scheme"] = scheme_of(case, layer)
        return "yes"

    def matches() -> str:
        error = rel_error(case.call(layer, *inputs), case.reference(layer, *inputs))
        return "yes" if error < 0.01 else f"error {error:.3g}"

    def reload() -> str:
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        pointers = {n: t.data_ptr() for n, t in tensors}
        case.load(layer, 2)
        now = {n: t.data_ptr() for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
        if now != pointers:
            return f"moved: {', '.join(n for n in now if now[n] != pointers.get(n))}"
        fresh = case.load(case.make(), 2)
        ours, theirs = dict(layer.named_parameters()), dict(fresh.named_parameters())
        other = [n for n in ours if n not in theirs or not torch.equal(bits(ours[n]), bits(theirs[n]))]
        if other:
            return f"other parameters than a fresh layer: {', '.join(other)}"
        same = torch.equal(case.call(layer, *inputs), case.call(fresh, *inputs))
        return "yes" if same else "other values than a fresh layer"

    def fullgraph() -> str:
        torch._dynamo.reset()
        backend = "inductor" if gpu else "eager"
        traced = torch.compile(lambda *given: case.call(layer, *given), fullgraph=True, backend=backend)
        expected, out = case.call(layer, *inputs), traced(*inputs)
        error = rel_error(out, expected)
        return "yes" if error < 2e-3 else f"error {error:.3g}"

    def graph() -> str:
        """Captured once, it serves other inputs and weights that are loaded later."""
        fixed = [t.clone() for t in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                case.call(layer, *fixed)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = case.call(layer, *fixed)
        for seed in (1, 3):
            case.load(layer, seed)
            for t, new in zip(fixed, inputs, strict=True):
                t.copy_(new.flip(0))
            captured.replay()
            if not torch.equal(out, case.call(layer, *fixed)):
                return f"replay differs after loading seed {seed}"
        return "yes"

    if step("loads", loads):
        step("matches", matches)
        step("reload", reload)
        if compiled:
            step("fullgraph", fullgraph)
        if gpu:
            step("graph", graph)
    return made


def main(path: str) -> None:
    made = []
    with torch.no_grad(), torch.device("cuda"):
        for case in cases():
            made.append(row(case, True))
            print(",".join(made[-1].values()), flush=True)
            with Path(path).open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(made)


if __name__ == "__main__":
    main(sys.argv[1])
