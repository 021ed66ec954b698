"""Layer sizes of real models: what benchmarks and tuning sweeps run over."""

from typing import Any

# (N, K) of the weights, as in nn.Linear
LINEAR_LAYERS = {
    "llama3_8b/qkv": (6144, 4096),
    "llama3_8b/o": (4096, 4096),
    "llama3_8b/gate_up": (28672, 4096),
    "llama3_8b/down": (4096, 14336),
    "llama3_70b/qkv": (10240, 8192),
    "llama3_70b/gate_up": (57344, 8192),
    "llama3_70b/down": (8192, 28672),
    "deepseek_v3/qkv_a": (2112, 7168),
    "deepseek_v3/q_b": (24576, 1536),
    "deepseek_v3/o": (7168, 16384),
    "deepseek_v3/gate_up": (4096, 7168),
    "deepseek_v3/down": (7168, 2048),
}
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)


def linear_cases(**more: Any) -> dict[str, dict[str, Any]]:
    """`inputs` arguments of a matrix product for every layer and token count, by name."""
    return {f"{layer}/M={m}": dict(M=m, N=n, K=k, **more) for layer, (n, k) in LINEAR_LAYERS.items() for m in TOKENS}


def activation_cases(**more: Any) -> dict[str, dict[str, Any]]:
    """`inputs` arguments of a quantizer: activations of the two sizes that the peers were measured at, and decode."""
    sizes = {
        "prefill_8192": (16384, 8192),
        "prefill_7168": (4096, 7168),
        "decode_7168": (64, 7168),
        "one_4096": (1, 4096),
    }
    return {name: dict(M=m, K=k, **more) for name, (m, k) in sizes.items()}


# name: (experts on this rank, experts per token, hidden size, intermediate size, share of rows that other ranks take)
MOE_LAYERS = {
    "mixtral_8x7b": (8, 2, 4096, 14336, 0.0),
    "deepseek_v3_ep8": (32, 8, 7168, 2048, 0.875),
    "deepseek_v3_tp8": (256, 8, 7168, 256, 0.0),
    "qwen3_30b_a3b": (128, 8, 2048, 768, 0.0),
    "gpt_oss_120b": (128, 4, 2880, 2880, 0.0),
}
MOE_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def grouped_cases(**more: Any) -> dict[str, dict[str, Any]]:
    """`inputs` arguments of a grouped product for both products of every expert layer; M counts routed rows."""
    return {
        f"{model}/{name}/T={t}": dict(M=t * top_k, N=n, K=k, E=experts, dropped=dropped, **more)
        for model, (experts, top_k, hidden, inner, dropped) in MOE_LAYERS.items()
        for name, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner))
        for t in MOE_TOKENS
    }


def routing_cases(**more: Any) -> dict[str, dict[str, Any]]:
    """`inputs` arguments of what happens between the products, for every expert layer: T tokens of H columns."""
    return {
        f"{model}/T={t}": dict(T=t, H=hidden, E=experts, top_k=top_k, dropped=dropped, **more)
        for model, (experts, top_k, hidden, _, dropped) in MOE_LAYERS.items()
        for t in MOE_TOKENS
    }
