"""The catalogue of errors: what a config, a layer or a checkpoint cannot be, when that is said and how.

A row that raises is a function that does everything up to the moment in question and returns the one call that must
raise: what is said too early or too late fails. A row that fpk supports, where engines raise or compute something else,
names the test that shows its numbers. `python tests/methods/catalogue.py` writes the table, results/errors.csv.
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "results" / "errors.csv"
MOMENTS = ("config", "create", "load", "process", "apply")
CHECKPOINT = "checkpoint"  # all of the moments in one: what `load_quantized` says of a broken file or tensor
COLUMNS = ("when", "condition", "outcome", "says", "test")


@dataclass(frozen=True)
class Raises:
    """At `when`, `prepare()()` raises `error` with a text that `says` is found in; `prepare()` itself does not."""

    when: str
    condition: str
    error: type[Exception]
    says: str
    prepare: Callable[[], Callable[[], Any]]

    @property
    def test(self) -> str:
        return f"test_catalogue.py::test_raises[{self.prepare.__name__}]"


@dataclass(frozen=True)
class Supports:
    """What engines refuse or get wrong at `when`, and the test of fpk's numbers (file::function, in tests/methods)."""

    when: str
    condition: str
    test: str


RAISES: list[Raises] = []


def raises(when: str, condition: str, error: type[Exception], says: str) -> Callable[[Any], Any]:
    """A row from a function that prepares it."""

    def declare(prepare: Callable[[], Callable[[], Any]]) -> Any:
        RAISES.append(Raises(when, condition, error, says, prepare))
        return prepare

    return declare


SUPPORTS = [
    Supports(when, condition, test)
    for when, condition, test in (
        ("config", "online: MXFP4 as {'weight': 'mxfp4'}",
         "test_supported.py::test_online_mxfp4_by_name_or_as_a_mapping"),
        ("config", "Quark: no KV-cache group, no specs by layer or by class",
         "test_supported.py::test_a_quark_config_without_its_optional_sections"),
        ("config", "Quark: dynamic FP8 activations per tensor",
         "test_supported.py::test_dynamic_activations_per_tensor"),
        ("create", "FP8 blocks: widths of q, k, v or gate, up that are no multiple of the block",
         "test_linear_block.py::test_every_shard_keeps_its_own_grid"),
        ("create", "FP8 blocks: ranks cut inside a block (linear)",
         "test_linear_block.py::test_ranks_may_cut_inside_blocks"),
        ("create", "FP8 blocks: I of a rank is no multiple of the block (experts)",
         "test_moe_fp8.py::test_ranks_hold_slices"),
        ("create", "MXFP6 weights alone", "test_moe_mx.py::test_every_ocp_mx_pair"),
        ("create", "MXFP6 weights with FP8 activations, static or dynamic", "test_moe_mx.py::test_every_ocp_mx_pair"),
        ("create", "OCP MX weights with dynamic FP8 activations", "test_moe_mx.py::test_every_ocp_mx_pair"),
        ("create", "NVFP4 experts that are not gated", "test_moe_mx.py::test_nvfp4_experts_that_are_not_gated"),
        ("create", "INT8 experts: static per tensor with weights per channel, dynamic with weights per tensor",
         "test_moe_quark.py::test_int8_all_four"),
        ("create", "MX or NVFP4: K is no multiple of the group (linear)", "test_supported.py::test_a_short_last_group"),
        ("load", "an expert of another rank: the loader returns False",
         "test_moe_fp8.py::test_experts_of_other_ranks"),
        ("load", "compressed-tensors: input scales of w1 and w3 differ",
         "test_supported.py::test_input_scales_of_gate_and_up_that_differ"),
        ("process", "NVFP4: second scales of w1 and w3 differ",
         "test_moe_mx.py::test_nvfp4_keeps_the_second_scales_of_gate_and_up"),
        ("process", "NVFP4: second scales of q, k and v differ",
         "test_supported.py::test_second_scales_of_q_k_and_v_that_differ"),
        ("process", "FP8: scales of a layer's shards differ",
         "test_linear_fp8.py::test_shards_are_brought_to_the_largest_scale"),
        ("process", "INT8: zero points of weights and activations", "test_moe_quark.py::test_int8_zero_points_count"),
        ("process", "static input scales of experts differ: the largest, or each expert's own",
         "test_moe_static.py::test_one_static_scale_an_expert"),
        ("process", "all weights of an expert are zero", "test_moe_online.py::test_zero_experts"),
        ("process", "KV cache: k_scale without v_scale", "test_kv_cache.py::test_k_alone_serves_both"),
        ("apply", "FP8 activations by group: K is no multiple of the group", "test_moe_fp8.py::test_block_scales"),
        ("apply", "x of any strides, or without rows", "test_linear_online.py::test_takes_any_strides_and_no_rows"),
    )
]  # fmt: skip


def rows() -> list[dict[str, str]]:
    """The table: by moment, what raises first."""
    import catalogue_configs  # noqa: F401  declares rows
    import catalogue_layers  # noqa: F401
    from test_checkpoint_errors import BROKEN

    made = []
    for when in MOMENTS:
        for row in (r for r in RAISES if r.when == when):
            made.append(
                dict(when=when, condition=row.condition, outcome=row.error.__name__, says=row.says, test=row.test)
            )
        for other in (s for s in SUPPORTS if s.when == when):
            made.append(dict(when=when, condition=other.condition, outcome="supported", says="", test=other.test))
    for name, (_, says) in BROKEN.items():
        test = f"test_checkpoint_errors.py::test_a_broken_checkpoint_changes_nothing[{name}]"
        made.append(dict(when=CHECKPOINT, condition=name, outcome="ValueError", says=says, test=test))
    return made


def text() -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows())
    return stream.getvalue()


if __name__ == "__main__":
    import catalogue  # the module that rows are declared in, which is not this one

    TABLE.write_text(catalogue.text())
