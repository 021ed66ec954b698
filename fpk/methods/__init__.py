"""Methods: how layers hold quantized weights and multiply by them; they only compose ops.

Names are imported when they are first touched, so reading a config compiles nothing.
"""

import importlib
from typing import Any

_NAMES = {
    "Attention": "base",
    "Linear": "base",
    "LinearMethod": "base",
    "RoutedExperts": "base",
    "UnquantizedLinearMethod": "base",
    "Fp8Config": "config",
    "Fp8KVCacheMethod": "kv_cache",
    "CompressedTensorsConfig": "compressed_tensors",
    "ExpertWeights": "moe",
    "Fp8LinearMethod": "fp8",
    "Fp8MoEMethod": "fp8_moe",
    "Fp8PerBlockOnlineLinearMethod": "online",
    "Fp8PerBlockOnlineMoEMethod": "online_moe",
    "Fp8PerTensorOnlineLinearMethod": "online",
    "Fp8PerTensorOnlineMoEMethod": "online_moe",
    "Fp8PtpcOnlineLinearMethod": "online",
    "Fp8PtpcOnlineMoEMethod": "online_moe",
    "FusedMoEMethod": "moe",
    "Int8PtpcOnlineLinearMethod": "online",
    "Int8PtpcOnlineMoEMethod": "online_moe",
    "Int8WeightOnlyOnlineMoEMethod": "online_moe",
    "MoEConfig": "moe_config",
    "ModelOptConfig": "engine",
    "Mxfp4Config": "engine",
    "Mxfp4MoEMethod": "mx_moe",
    "Mxfp4OnlineLinearMethod": "online_mx",
    "Mxfp4OnlineMoEMethod": "online_moe",
    "Mxfp8Config": "engine",
    "Mxfp8OnlineLinearMethod": "online_mx",
    "Mxfp8OnlineMoEMethod": "online_moe",
    "Nvfp4OnlineLinearMethod": "online_mx",
    "Nvfp4OnlineMoEMethod": "online_moe",
    "Nvfp4ExpertsMethod": "mx_moe",
    "OnlineConfig": "online_config",
    "QuarkConfig": "quark",
    "QuarkNvfp4MoEMethod": "mx_moe",
    "QuarkOCP_MX_MoEMethod": "mx_moe",
    "QuarkW4A8Fp8MoEMethod": "quark_moe",
    "QuarkW8A8Fp8MoEMethod": "quark_moe",
    "QuarkW8A8Int8MoEMethod": "quark_moe",
    "SchemeLinearMethod": "scheme",
    "UnquantizedFusedMoEMethod": "moe",
    "is_layer_skipped": "skip",
    "load_dummy_weights": "loading",
    "pre_processed_weights": "loading",
    "use_reduce_max": "parallel",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fpk.methods' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fpk.methods.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
