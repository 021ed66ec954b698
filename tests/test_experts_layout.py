"""What modules of experts compute is asked of them: limits, layouts and activations, whatever a class calls them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fpk
from fpk._experts import QuantizedExperts
from fpk._experts_layout import expert_layout
from fpk.check import rel_error

E, H, I = 5, 64, 32


pytestmark = pytest.mark.usefixtures("on_references")


class Stacked(nn.Module):
    """Experts as transformers writes them; `gate` is the class' own activation."""

    def __init__(self, gate, transposed=False, bias=False, down=E, **attributes):
        super().__init__()
        self.gate, self.transposed = gate, transposed
        shapes = dict(gate_up_proj=(E, 2 * I, H), down_proj=(down, H, I))
        for name, (e, n, k) in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn((e, k, n) if transposed else (e, n, k)) * 0.3))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(e, n)))
        for name, value in attributes.items():
            setattr(self, name, value)

    def product(self, x, name, e):
        weight, bias = getattr(self, name)[e], getattr(self, f"{name}_bias", None)
        out = x @ weight if self.transposed else x @ weight.mT
        return out if bias is None else out + bias[e]

    def finish(self, x):
        return x

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(len(self.down_proj)):
            token, rank = (top_k_index == e).nonzero(as_tuple=True)
            hidden = self.gate(self, self.product(hidden_states[token], "gate_up_proj", e))
            done = self.finish(self.product(hidden, "down_proj", e))
            out.index_add_(0, token, done * top_k_weights[token, rank, None].to(done.dtype))
        return out


class Normalized(Stacked):
    def finish(self, x):
        return F.rms_norm(x, x.shape[-1:])


class WithNorm(Stacked):
    def __init__(self, gate):
        super().__init__(gate)
        self.post_expert_norm = nn.RMSNorm(H)


def halves(h):
    return h.chunk(2, -1)


def silu(m, h):
    gate, up = halves(h)
    return F.silu(gate) * up


def limited(m, h):
    gate, up = halves(h)
    return F.silu(gate.clamp(max=m.limit)) * up.clamp(-m.limit, m.limit)


def limited_after(m, h):
    gate, up = halves(h)
    return F.silu(gate).clamp(max=m.swiglu_limit) * up.clamp(-m.swiglu_limit, m.swiglu_limit)


def oai(m, h):
    gate, up = halves(h) if not m.interleaved else (h[..., 0::2], h[..., 1::2])
    gate, up = gate.clamp(max=m.limit), up.clamp(-m.limit, m.limit)
    return gate * torch.sigmoid(gate * m.alpha) * (up + 1)


def gelu(m, h):
    gate, up = halves(h)
    return F.gelu(gate) * up


def gelu_tanh(m, h):
    gate, up = halves(h)
    return F.gelu(gate, approximate="tanh") * up


TAKEN = {
    "silu": lambda: Stacked(silu),
    "silu with a limit that never counts": lambda: Stacked(limited, limit=float("inf")),
    "limit": lambda: Stacked(limited, limit=1.5),
    "limit of hundreds": lambda: Stacked(limited, limit=400.0),
    "limit behind the activation": lambda: Stacked(limited_after, swiglu_limit=0.5),
    "gpt-oss": lambda: Stacked(oai, True, True, alpha=1.702, limit=2.0, interleaved=True),
    "gpt-oss in halves": lambda: Stacked(oai, True, True, alpha=1.3, limit=2.0, interleaved=False),
    "gelu": lambda: Stacked(gelu),
    "gelu_tanh": lambda: Stacked(gelu_tanh),
}
REFUSED = {
    "relu": lambda: Stacked(lambda m, h: F.relu(halves(h)[0]) * halves(h)[1]),
    "up and gate": lambda: Stacked(lambda m, h: halves(h)[0] * F.silu(halves(h)[1])),
    "another limit": lambda: Stacked(lambda m, h: silu(m, h.clamp(-2, 2)), limit=3.0),
    "a norm without weights": lambda: Normalized(silu),
    "a norm with weights": lambda: WithNorm(silu),
    "more gates than downs": lambda: Stacked(silu, down=E - 1),
    "raises": lambda: Stacked(lambda m, h: h.view(7, -1)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_layer_computes_what_the_module_does(name):
    torch.manual_seed(0)
    module = TAKEN[name]().bfloat16()
    x, weights, ids = torch.randn(20, H).bfloat16(), torch.rand(20, 2), torch.rand(20, E).topk(2).indices
    new = QuantizedExperts.from_module(module, "int8_channel:none")
    for key, values in zip(("gate_up_proj", "down_proj"), new.dequantize(), strict=True):
        getattr(module, key).copy_(values.mT if module.transposed else values)
    assert rel_error(new(x, ids, weights), module(x, ids, weights)) < 0.01
    with torch.device("meta"):
        assert expert_layout(TAKEN[name]().bfloat16())["options"] == new.options


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_compute_something_else_are_left_alone(name):
    model = nn.ModuleDict(dict(experts=REFUSED[name](), o_proj=nn.Linear(H, H)))
    report = fpk.quantize_(model, "fp8_channel")
    assert [r.name for r in report.changed] == ["o_proj"]
    assert [r.reason for r in report.skipped] == ["holds experts that compute what fpk has no layer for"]
    with pytest.raises(ValueError, match=r"experts: expected experts"):
        QuantizedExperts.from_module(model["experts"], "fp8_channel")


@pytest.mark.parametrize("kind, options", [
    ("deepseek_v4", dict(activation="silu", limit=0.75)), ("gpt_oss", None), ("mixtral", dict(activation="silu")),
])  # fmt: skip
def test_classes_of_transformers(kind, options):
    """Their own forward is wrapped by the choice of a kernel; the limit is what their config has."""
    transformers = pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["*"])
    config = transformers.AutoConfig.for_model(kind)
    config.hidden_size, config.intermediate_size, config.num_local_experts = H, I, E
    config.swiglu_limit, config._experts_implementation = 0.75, "grouped_mm"
    made = next(getattr(module, n) for n in dir(module) if n.lower() == kind.replace("_", "") + "experts")(config)
    found = expert_layout(made)["options"]
    assert found == (options or dict(activation="swigluoai", interleaved=True, alpha=1.702, limit=0.75))
