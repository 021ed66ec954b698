"""Keys of `quantization_config`: those that fpk reads, those that change nothing, and what is done with others.

A key that is dropped in silence is how a model comes to talk nonsense: what would change numbers is refused, what fpk
has never heard of is warned about.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

_FP8 = (
    "activation_scheme ignored_layers modules_to_not_convert modules_to_convert weight_block_size store_dtype fmt "
    "scale_fmt kv_cache_scheme export expert_dtype dequantize version"
)
KEYS = {
    "fp8": _FP8,
    "mxfp4": _FP8,
    "mxfp8": _FP8,
    "fbgemm_fp8": "activation_scale_ub modules_to_not_convert",
    "compressed-tensors": (
        "format quantization_status config_groups ignore kv_cache_scheme global_compression_ratio sparsity_config "
        "transform_config moe_sparsity_config version run_compressed"
    ),
    "quark": (
        "global_quant_config layer_quant_config layer_type_quant_config kv_cache_quant_config exclude algo_config "
        "softmax_quant_spec quant_mode kv_cache_post_rope version export"
    ),
    "modelopt": (
        "quantization quant_algo config_groups ignore exclude_modules kv_cache_scheme kv_cache_quant_algo producer "
        "quantized_layers group_size has_zero_point pre_quant_scale version"
    ),
}
"""By `quant_method`."""

CT_GROUP = "targets weights input_activations output_activations format"
CT_ARGUMENTS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype zp_dtype observer "
    "observer_kwargs"
)
QUARK_LAYER = "weight input_tensors output_tensors bias target_device"
QUARK_SPEC = (
    "dtype qscheme ch_axis group_size block_size is_dynamic symmetric round_method scale_type scale_format "
    "scale_calculation_mode observer_cls is_scale_quant zero_point_type mx_element_dtype enable_buffer_reuse "
    "max_input_numel"
)
_ONLINE = ("r3", "r4", "online_r1_rotation", "online_config")
"""Of Quark's rotations, those that layers apply to activations at every call."""


def unknown_keys(what: str, config: Mapping[str, Any], known: str) -> list[str]:
    """Warn about the keys of a config that are not known; the warnings."""
    told = [f"{what}.{key}: not known to fpk, without effect" for key in config if key not in known.split()]
    for note in told:
        warnings.warn(note, stacklevel=3)
    return told


def method_keys(config: Mapping[str, Any], method: str) -> list[str]:
    """`unknown_keys` of a whole `quantization_config`."""
    told = unknown_keys("quantization_config", config, f"quant_method {KEYS[method]}")
    inner = config.get("quantization")  # of hf_quant_config.json
    return told + unknown_keys("quantization", inner, KEYS[method]) if isinstance(inner, Mapping) else told


def expect_scale_format(what: str, given: Any) -> str | None:
    """ "ue8m0" or None for fp32: the scales of activations by group; ValueError for others."""
    if given in (None, "float", "float32", "fp32"):
        return None
    if given != "ue8m0":
        raise ValueError(f"{what}: expected float or ue8m0, got {given!r:.80}")
    return "ue8m0"


def transform_notes(config: Mapping[str, Any]) -> list[str]:
    """Refuse what compressed-tensors' `transform_config` wants done to activations; notes for the rest.

    Raises:
        ValueError: the section is not as it should be.
        NotImplementedError: a transform of a layer's input or output.
    """
    what, section = "quantization_config.transform_config", config.get("transform_config")
    if not section:
        return []
    if not isinstance(section, Mapping) or not isinstance(section.get("config_groups", {}), Mapping):
        raise ValueError(f"{what}: expected an object with config_groups, got {section!r:.80}")
    notes = []
    for name, group in section.get("config_groups", {}).items():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        applied = applied if isinstance(applied, (list, tuple)) else [applied]
        for place in [a.get("location") if isinstance(a, Mapping) else None for a in applied]:
            if place in ("weight_input", "weight_output"):
                continue  # the stored weights have it
            if place not in ("k_cache", "q_attn"):
                raise NotImplementedError(f"{what}.{name}: fpk's layers transform no activations, got {place!r:.80}")
            notes.append(f"{what}.{name}: {place} is not transformed")  # keys and queries alike: it cancels
    return notes


def algorithm_notes(config: Mapping[str, Any]) -> list[str]:
    """The same for Quark's `algo_config` and `softmax_quant_spec`."""
    found = config.get("algo_config") or []
    for entry in found if isinstance(found, (list, tuple)) else [found]:
        if not isinstance(entry, Mapping):
            raise ValueError(f"quantization_config.algo_config: expected objects, got {entry!r:.80}")
        online = [key for key in _ONLINE if entry.get(key)]
        if online:
            raise NotImplementedError(
                f"quantization_config.algo_config: fpk's layers rotate no activations, got {', '.join(online)} of "
                f"{entry.get('name')!r:.80}"
            )
    if config.get("softmax_quant_spec") is None:
        return []
    return ["quantization_config.softmax_quant_spec: fpk's attention does not quantize its probabilities"]


def cache_told(config: Mapping[str, Any], places: Iterable[Mapping[str, Any]]) -> str:
    """What ModelOpt wants the KV cache to be, if that is not FP8 by a fixed scale; "" otherwise."""
    for place in places:
        name = place.get("kv_cache_quant_algo")
        if name is not None and str(name).upper() != "FP8":
            return f"kv_cache_quant_algo {name!r:.80}"
    scheme = config.get("kv_cache_scheme")
    if scheme is None:
        return ""
    if not isinstance(scheme, Mapping):
        return f"kv_cache_scheme {scheme!r:.80}"
    wanted = dict(type="float", num_bits=8, dynamic=False)
    return ", ".join(f"{k} {scheme[k]!r:.80}" for k, v in wanted.items() if scheme.get(k, v) != v)
