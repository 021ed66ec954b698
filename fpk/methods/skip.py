"""Which layers a quantization config leaves alone: one matcher for all the ways in which skip lists are written."""

from collections.abc import Iterable, Mapping, Sequence

from fpk.methods._expressions import expression

MATCH_MODES = ("exact", "substring", "suffix")


def is_layer_skipped(
    prefix: str,
    ignored_layers: Iterable[str],
    fused_mapping: Mapping[str, Sequence[str]] | None = None,
    match_mode: str = "exact",
    matched: set[str] | None = None,
) -> bool:
    """Does the skip list name this layer?

    Args:
        prefix: the layer's dotted name.
        ignored_layers: entries. In every mode `re:<regex>` is a regular expression matched from the name's start.
        fused_mapping: names of fused projections and of their parts, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}. A
            fused layer is skipped if its own name is listed, or all of its parts are.
        match_mode: "exact"; "substring": an entry occurs in the name; "suffix": an entry is the name or its end after a
            dot. With "exact", an experts layer is also skipped if an entry names something inside it
            ("model.layers.0.mlp.experts.3.down_proj").
        matched: takes the entries that matched.

    Raises:
        ValueError: unknown mode, a broken regular expression, or a fused layer of which only some parts are listed.
    """
    if match_mode not in MATCH_MODES:
        raise ValueError(f"ignored_layers_match_mode: expected one of {', '.join(MATCH_MODES)}, got {match_mode!r}")
    entries = list(ignored_layers)

    def listed(name: str) -> bool:
        hits = [e for e in entries if _matches(name, e, match_mode)]
        if matched is not None:
            matched.update(hits)
        return bool(hits)

    parent, _, projection = prefix.rpartition(".")
    if fused_mapping and projection in fused_mapping:
        if listed(prefix):
            return True
        parts = list(fused_mapping[projection])
        skipped = [listed(f"{parent}.{part}" if parent else part) for part in parts]
        if len(set(skipped)) > 1:
            missing = [part for part, skip in zip(parts, skipped, strict=True) if not skip]
            raise ValueError(
                f"{prefix}: expected all parts of the fused layer or none in the list of ignored layers, got all but "
                f"{', '.join(missing)}"
            )
        return any(skipped)
    if match_mode == "exact" and "experts" in prefix:
        inside = [e for e in entries if not e.startswith("re:") and "experts" in e and prefix in e]
        if matched is not None:
            matched.update(inside)
        return listed(prefix) or bool(inside)
    return listed(prefix)


def _matches(name: str, entry: str, mode: str) -> bool:
    if entry.startswith("re:"):
        return expression("ignored_layers", entry[3:])(name)
    if mode == "substring":
        return entry in name
    return name == entry or (mode == "suffix" and name.endswith("." + entry))
