"""What a campaign measures, the most important first. `campaign.py --list` shows it beside what results/ has.

Seconds are those of an H200 with 16 cores. What an entry has not finished when its time is over goes on in the next
call, given `--resume`: benches continue their CSV files, tables their cases, laws what has not passed.
"""

import csv

from campaign_job import ROOT, Measurement

GPU = "nv-h200-sm90-132"
RESULTS = ROOT / "results" / GPU
BENCH = ("{python}", "-W", "ignore", "{bench}/")
TRIED = ("--max-candidates", "24", "--budget", "0", "--final-ms", "20", "--minutes", "60", "--compile-limit", "90")
LAYERS = ((2112, 7168), (4096, 4096), (7168, 2048), (6144, 4096), (4096, 14336), (28672, 4096))  # of the tables
NEW_LAYERS = ((10240, 8192), (24576, 1536), (4096, 7168), (8192, 28672))
LONG_LAYERS = ((7168, 16384), (57344, 8192))
FAST = ("fast_accum=True",)
COLUMN = ("scale_layout=column",)  # as TMA reads them
STREAMS = ("--all-of", "ordered,joint", "--max-candidates", "16")
EXPERT_STREAMS = ("--all-of", "streams", "--max-candidates", "16")
MXFP4_NVFP4 = ("weight=mxfp4/bf16", "weight=nvfp4/bf16")
NVFP4 = ("quantize_nvfp4", "act_and_mul_quantize_nvfp4")
SHARES = ("--all-of", "shares", "--max-candidates", "28")  # 15 to 20 of them, and what else was good
# experts, rows of a token, and an expert's columns and K: Mixtral 8x7B, Qwen3-30B-A3B, DeepSeek-V3 cut eight ways
EXPERTS = (
    (8, 2, 28672, 4096), (8, 2, 4096, 14336), (128, 8, 1536, 2048), (128, 8, 2048, 768), (256, 8, 512, 7168),
    (256, 8, 7168, 256),
)  # fmt: skip
RANK = ((4096, 7168), (7168, 2048))  # DeepSeek-V3 with 32 of its experts on a rank, seven of eight rows elsewhere
# of dense.csv, so that the first ones already span small and large
DENSE = (
    "deepseek_v3/gate_up", "llama3_8b/gate_up", "llama3_70b/qkv", "deepseek_v3/qkv_a", "llama3_8b/down",
    "deepseek_v3/o", "llama3_8b/qkv", "llama3_8b/o", "deepseek_v3/q_b", "deepseek_v3/down", "llama3_70b/gate_up",
    "llama3_70b/down",
)  # fmt: skip


def bench(script: str, *arguments: str) -> tuple[str, ...]:
    return (*BENCH[:3], f"{{bench}}/{script}.py", *arguments)


def cases(tokens: tuple[int, ...], layers: tuple[tuple[int, int], ...], more: tuple[str, ...] = ("",)) -> str:
    return "; ".join(f"M={m} N={n} K={k} {x}".strip() for x in more for n, k in layers for m in tokens)


def expert_cases(tokens: tuple[int, ...]) -> str:
    whole = [f"M={t * j} N={n} K={k} E={e}" for e, j, n, k in EXPERTS for t in tokens]
    return "; ".join(whole + [f"M={t * 8} N={n} K={k} E=32 dropped=0.875" for n, k in RANK for t in tokens])


def layer_cases(tokens: tuple[int, ...], gathered: int) -> str:
    """As layers with scales by channel ask for them: first products of so many columns, or few rows, gather."""
    whole = [
        f"M={t * j} N={n} K={k} E={e} fast_accum=True"
        + (f" gather={j}" if i % 2 == 0 and (n <= gathered or t * j <= 8 * e) else "")
        for i, (e, j, n, k) in enumerate(EXPERTS) for t in tokens
    ]  # fmt: skip
    return "; ".join(whole)


def tables(name: str, op: str, wanted: str, seconds: float, fills: str, more: tuple[str, ...] = ()) -> Measurement:
    arguments, some = ("--ops", op, *TRIED, *more), wanted.rpartition("; ")[2]
    folders = ("--out", "{out}", "--state", "{scratch}/state/" + name)
    command = bench("tune", *arguments, "--cases", wanted, *folders, "--processes", "{jobs}")
    dry = ("tune", *arguments, "--cases", some, "--out", "{out}", "--state", "{out}/state", "--list")
    return Measurement(name, fills, command, dry, seconds, 1.5 * seconds + 10, table=op, wanted=wanted)


def laws(
    name: str, seconds: float, *tests: str, keyword: str = "", jobs: int = 2, least: float = 30.0, examples: int = 6
) -> Measurement:
    command = bench("gpu_laws", "--out", "{out}", "--jobs", str(jobs), "--examples", str(examples))
    only = (("--keyword", keyword), ("-k", keyword)) if keyword else ((), ())
    return Measurement(
        name, f"laws compiled: {' '.join(tests)} {keyword}".strip(), (*command, *only[0], *tests),
        ("pytest", *only[1], *tests), seconds, 3 * seconds, quiet=False, least=least,
    )  # fmt: skip


def not_repeated() -> tuple[str, ...]:
    """Ops whose launches have not been repeated 1000 times."""
    with (RESULTS / "trust.csv").open(newline="") as file:
        done = {r["op"] for r in csv.DictReader(file) if r["tool"] == "repeat" and r["verdict"] == "same bits"}
    every = (ROOT / "fpk" / "kernels").glob("*/[a-z]*.py")
    return tuple(sorted({path.stem for path in every} - done))


TABLES = (
    tables("tables_group", "scaled_mm_group", cases((16, 64, 256, 1024, 4096), LAYERS, COLUMN), 75,
           "autotune_db: 30 shapes", STREAMS),
    tables("tables_group_256", "scaled_mm_group", cases((256,), (*NEW_LAYERS, *LONG_LAYERS), COLUMN), 12,
           "autotune_db: 256 tokens, six more layers", STREAMS),
    tables("tables_weight_only", "mm_weight_only", "M=1024 N=28672 K=4096; M=4096 N=28672 K=4096", 12,
           "autotune_db: two keys measured with older kernels"),
    tables("tables_64", "scaled_mm", cases((64,), (*LAYERS, *NEW_LAYERS, *LONG_LAYERS), FAST), 42,
           "autotune_db: 64 tokens, fast accumulation", SHARES),
    tables("tables_few", "scaled_mm", cases((1, 16), (*LAYERS, *NEW_LAYERS, *LONG_LAYERS), FAST) + "; "
           + cases((32,), LAYERS, FAST), 125, "autotune_db: up to 64 tokens, fast accumulation", SHARES),
    tables("tables_few_full", "scaled_mm", cases((1, 16, 64), LAYERS), 60, "autotune_db: up to 64 tokens", SHARES),
    tables("tables_grouped", "grouped_scaled_mm_group", expert_cases((1024, 4096)), 80,
           "autotune_db: 16 layers of experts", EXPERT_STREAMS),
    tables("tables_experts_channel", "grouped_scaled_mm", layer_cases((4, 16, 64, 256, 1024, 4096), 4096), 110,
           "autotune_db: layers of experts, scales by channel", ("--all-of", "gluon", "--max-candidates", "32")),
    tables("tables_experts_few", "grouped_scaled_mm_group", expert_cases((4, 16, 64, 256)), 60,
           "autotune_db: layers of experts, scales by block, few tokens", ("--max-candidates", "28")),
    tables("tables_gpt_oss", "grouped_mm_shuffled", "; ".join(
           f"M={4 * t} N={n} K=2880 E=128 bias=True{more}" for t in (1, 4, 16, 64, 256, 1024, 4096)
           for n, more in ((5760, " act=swigluoai"), (2880, ""))), 40, "autotune_db: gpt-oss-120b's experts",
           ("--max-candidates", "32")),
    tables("verify_scaled_mm", "scaled_mm", cases((4, 48, 256, 512, 2048), ((2112, 7168), (4096, 4096), (28672, 4096)))
           + "; " + cases((16, 128, 1024), NEW_LAYERS), 60, "tests/tune_data/verify_*: 15 new token counts, 12 shapes"),
    tables("verify_group", "scaled_mm_group", cases((48, 512), LAYERS, COLUMN) + "; "
           + cases((16, 128, 1024), NEW_LAYERS, COLUMN), 60, "tests/tune_data/verify_*", STREAMS),
    tables("verify_weight_only", "mm_weight_only", cases((32, 256), LAYERS) + "; "
           + cases((16, 128, 1024), NEW_LAYERS), 60, "tests/tune_data/verify_*"),
    tables("verify_shuffled", "mm_shuffled", cases((4, 24, 128, 512), ((4096, 4096), (28672, 4096)), MXFP4_NVFP4)
           + "; " + cases((16, 64, 1024), ((2112, 7168), (8192, 28672)), MXFP4_NVFP4), 50, "tests/tune_data/verify_*"),
    tables("verify_packed", "mm_packed", cases((512, 2048), ((4096, 4096), (28672, 4096)),
           ("pair=mxfp8_e4m3/mxfp8_e4m3",)) + "; " + cases((1024, 4096), ((2112, 7168), (8192, 28672)),
           ("pair=mxfp8_e4m3/mxfp8_e4m3",)), 40, "tests/tune_data/verify_*"),
)  # fmt: skip

LAWS = (
    laws("laws_moe", 80, "tests/test_moe_gpu.py", jobs=4),
    laws("laws_experts", 60, "tests/laws/test_shuffled_experts.py", "tests/methods/test_moe_mx.py"),
    laws("laws_packed", 90, "tests/laws/test_packed.py", "tests/laws/test_pack.py", "tests/laws/test_microscale.py"),
    laws("laws_packed_ops", 90, "tests/test_ops.py", keyword="packed or shuffle or pack or quantize", jobs=4),
    laws("laws_dense", 100, "tests/test_dense_gpu.py", "tests/test_block_gpu.py", "tests/laws/test_weight_only.py"),
    laws("laws_prefill", 60, "tests/laws/test_prefill.py", "tests/laws/test_attention.py", least=0.0),
    laws("laws_nvfp4", 40, "tests/laws/test_activation.py", "tests/laws/test_quant.py",
         keyword="fused_equals or any_width", jobs=3),
    laws("laws_launch", 60, "tests/test_compiled_gpu.py", "tests/test_gpu.py", "tests/test_dense_gpu.py",
         keyword="compiled or first_thing or leave_late", jobs=3),
    laws("laws_rest", 200, "tests/test_moe_token.py", "tests/test_gpu.py", "tests/laws",
         "tests/test_ops.py", "tests/test_batch_invariant.py", "tests/cases", jobs=3, least=0.0),
)  # fmt: skip

DENSE_KERNELS = ("fpk/kernels/gemm", "autotune_db")
MOE_KERNELS = ("fpk/kernels/moe", "fpk/_moe.py")
FEW, MANY = ("1", "16", "64", "256"), ("1024", "4096", "8192")


def dense(name: str, tokens: tuple[str, ...], seconds: float, *products: str) -> Measurement:
    """Blocks of 200 ms where the power limit is felt, shorter ones for few tokens."""
    blocks = ("200", "--rounds", "2") if tokens == MANY else ("60", "--settle-ms", "15", "--rounds", "3")
    common = ("dense", "--csv", "{out}/dense.csv", "--peers", "{bench}/peers.py", "--products", *products, "--layers")
    return Measurement(
        name, f"{', '.join(products)} of 12 layers beside peers, {tokens[0]} to {tokens[-1]} tokens",
        bench(*common, *DENSE, "--tokens", *tokens, "--block-ms", *blocks, "--warm", "{jobs}"),
        (*common, DENSE[0], "--tokens", "1", "--block-ms", "1", "--settle-ms", "1", "--rounds", "1", "--warm", "1"),
        seconds, 2 * seconds, csv=f"{GPU}/products.csv", inputs=DENSE_KERNELS,
    )  # fmt: skip


LAYERS_OF_EXPERTS = ("mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3_tp8", "deepseek_v3")


def experts(
    name: str, fills: str, seconds: float, models: tuple[str, ...], scheme: str, tokens: tuple[int, ...], *stages: str
) -> Measurement:
    """Layers of experts, or some of their stages, beside others."""
    only = ("--stages", *stages) if stages else ()
    common = ("--csv", "{out}/moe.csv", "--schemes", scheme, *only)
    walked = ("--models", models[0], "--tokens", str(tokens[0]), "--block-ms", "1", "--rounds", "1")
    return Measurement(
        name, fills, bench("moe", *common, "--models", *models, "--tokens", *map(str, tokens), "--jobs", "{jobs}"),
        ("moe", *common, *walked), seconds, 2 * seconds, csv=f"{GPU}/moe.csv", inputs=MOE_KERNELS,
    )  # fmt: skip


DENSE_PARTS = (
    dense("dense_block_many", MANY, 80, "fp8_block"),
    dense("dense_block_few", FEW, 45, "fp8_block"),
    dense("dense_block_256", FEW[2:], 25, "fp8_block"),
    dense("dense_few", FEW[:3], 70, "fp8_token", "int8_token"),
    dense("dense_many", MANY, 75, "fp8_token"),
    dense("dense_weight_only", FEW[:3], 50, "fp8_weight_only", "int8_weight_only"),
    dense("dense_int8_many", MANY, 50, "int8_token"),
    dense("dense_rest", FEW[3:], 50, "fp8_token", "fp8_weight_only", "int8_token"),
    dense("dense_tensor_few", FEW, 40, "fp8_tensor"),
    dense("dense_tensor_many", MANY, 60, "fp8_tensor"),
)

PLAN = (
    *TABLES,
    *DENSE_PARTS,
    *LAWS[:5],
    Measurement(
        "packed", "packed products through the shipped tables",
        bench("packed_products", "--csv", "{out}/packed.csv", "--warm", "{jobs}"),
        ("packed_products", "--csv", "{out}/packed.csv", "--products", "bf16 x mxfp4", "fp8_token x mxfp4",
         "mxfp8_e4m3 x mxfp8_e4m3", "bf16 x mxfp8_e4m3", "--block-ms", "1", "--rounds", "1"),
        70, 110, csv=f"{GPU}/packed.csv", inputs=DENSE_KERNELS,
    ),
    Measurement(
        "layer_gpt_oss", "gpt-oss layer of experts, MXFP4 weights",
        bench("moe", "--csv", "{out}/moe.csv", "--models", "gpt_oss_120b", "--schemes", "mxfp4", "--jobs", "{jobs}"),
        ("moe", "--csv", "{out}/moe.csv", "--models", "gpt_oss_120b", "--schemes", "mxfp4", "--tokens", "1",
         "--block-ms", "1", "--rounds", "1"),
        60, 120, csv=f"{GPU}/moe.csv", inputs=MOE_KERNELS,
    ),
    experts("layer_gpt_oss_many", "gpt-oss layer of experts, MXFP4 weights, from 64 tokens", 60, ("gpt_oss_120b",),
            "mxfp4", (64, 256, 1024, 4096)),
    experts("products_int8", "grouped INT8 products", 40, LAYERS_OF_EXPERTS, "int8_channel:int8_token",
            (256, 1024, 4096), "w13", "w2"),
    experts("layer_bf16", "layers of experts in bf16", 40, LAYERS_OF_EXPERTS, "bf16", (1, 16, 256, 4096), "layer"),
    *(experts(f"moves_{scheme[4:9]}", "steps between products beside copies", 30, LAYERS_OF_EXPERTS, scheme,
              (1024, 4096), "quantize", "permute", "activation", "unpermute", "routing")
      for scheme in ("fp8_channel:fp8_token", "fp8_block128:fp8_group128")),
    Measurement(
        "layer_block", "layers of experts with block scales, 16 tokens and 1024 and more",
        bench("moe", "--csv", "{out}/moe.csv", "--models", "deepseek_v3_tp8", "mixtral_8x7b", "qwen3_30b_a3b",
              "deepseek_v3", "--schemes", "fp8_block128:fp8_group128", "--tokens", "1024", "4096", "16", "--stages",
              "layer", "w13", "w2", "--jobs", "{jobs}"),
        ("moe", "--csv", "{out}/moe.csv", "--models", "deepseek_v3", "--schemes", "fp8_block128:fp8_group128",
         "--tokens", "64", "--stages", "layer", "w13", "--block-ms", "1", "--rounds", "1"),
        40, 80, csv=f"{GPU}/moe.csv", inputs=MOE_KERNELS,
    ),
    Measurement(
        "perplexity_experts", "perplexity of a model through every method of experts",
        ("{python}", "-W", "ignore", "-m", "fpk.study.online", "{out}/online.csv", "9", "512", "", "experts"),
        ("fpk.study.online", "{out}/online.csv", "1", "16", "1", "experts"),
        60, 200, quiet=False, needs=("model",), csv=f"{GPU}/online.csv", inputs=("fpk/methods", "fpk/kernels/moe"),
    ),
    Measurement(
        "notebook_5", "notebook 5 in full",
        ("{python}", "-W", "ignore", "{root}/tests/run_notebooks.py", "5_model", "--out", "{out}"),
        ("imports", "{root}/notebooks/5_model.py"), 60, 120, quiet=False, needs=("model",),
    ),
    Measurement(
        "soak", "five minutes of all ops on threads, streams and in graphs: trust.csv",
        ("{python}", "-W", "ignore", "-m", "trust.soak", "soak", "--seconds", "{seconds}", "--csv", "{out}/soak.csv"),
        ("trust.soak", "soak", "--seconds", "3", "--csv", "{out}/soak.csv", "amax"),
        300, 300, quiet=False, least=298, csv=f"{GPU}/trust.csv",
    ),
    Measurement(
        "repeat", "1000 launches with the same bits, of ops that have no row: trust.csv",
        ("{python}", "-W", "ignore", "-m", "trust.sanitize", "repeat", "--jobs", "1", "--out", "{out}",
         *not_repeated()),
        ("trust.on_gpu", "repeat", "amax"), 150, 300, quiet=False, csv=f"{GPU}/trust.csv",
    ),
    Measurement(
        "sanitizers", "the streaming kernels under compute-sanitizer, and 1000 launches of each: trust.csv",
        ("{python}", "-W", "ignore", "-m", "trust.sanitize", "repeat", "memcheck", "racecheck", "--jobs", "3", "--out",
         "{out}", "scaled_mm", "scaled_mm_group", "grouped_scaled_mm_group"),
        ("trust.on_gpu", "repeat", "scaled_mm"), 150, 400, quiet=False, csv=f"{GPU}/trust.csv",
    ),
    Measurement(
        "compare", "every kernel of every op against its reference: trust.csv",
        ("{python}", "-W", "ignore", "-m", "trust.sanitize", "compare", "--jobs", "2", "--out", "{out}"),
        ("trust.on_gpu", "compare", "amax"), 150, 300, quiet=False, csv=f"{GPU}/trust.csv",
    ),
    Measurement(
        "parallel_table", "methods on two ranks under NCCL",
        ("{python}", "-W", "ignore", "{root}/tests/parallel/table.py", "{out}/parallel.csv", "--jobs", "{jobs}"),
        ("table:command_line", "{out}/parallel.csv", "--jobs", "2"),
        150, 250, gated=False, gpus=2, csv=f"{GPU}/parallel.csv", inputs=("fpk/parallel",),
    ),
    Measurement(
        "expert_parallel", "a layer of experts over two GPUs", bench("ep", "--csv", "{out}/ep.csv"),
        ("ep", "--csv", "{out}/ep.csv", "--ranks", "1"),
        50, 100, gpus=2, csv=f"{GPU}/ep.csv", inputs=("fpk/parallel", "fpk/kernels/moe"),
    ),
    Measurement(
        "dispatch", "what a call costs on the host before its launch",
        bench("dispatch", "--csv", "{out}/dispatch.csv"), ("dispatch", "--csv", "{out}/dispatch.csv"),
        20, 40, host=True, csv=f"{GPU}/dispatch.csv", inputs=("fpk/_dispatch.py", "fpk/op.py", "autotune_db"),
    ),
    *LAWS[5:],
    Measurement(
        "attention", "paged attention and writes of its cache",
        bench("attention", "--csv", "{out}/attention.csv", "--jobs", "1"),
        ("attention", "--csv", "{out}/attention.csv"),
        30, 60, csv=f"{GPU}/attention.csv", inputs=("fpk/kernels/attention",),
    ),
    Measurement(
        "quantizers", "quantizers beside copies",
        bench("tables", "quantizers", "--csv", "{out}/quantizers.csv", "--search", "8", "--block-ms", "15",
              "--rounds", "3"),
        ("tables", "quantizers", "--csv", "{out}/quantizers.csv", "--ops", "amax", "--search", "2", "--block-ms", "1",
         "--rounds", "1"),
        90, 150, csv=f"{GPU}/quantizers.csv", inputs=("fpk/kernels/quant",),
    ),
    Measurement(
        "quantizers_nvfp4", "NVFP4 quantizers beside copies",
        bench("tables", "quantizers", "--csv", "{out}/quantizers.csv", "--ops", *NVFP4, "--search", "8", "--block-ms",
              "15", "--rounds", "3"),
        ("tables", "quantizers", "--csv", "{out}/quantizers.csv", "--ops", "quantize_nvfp4", "--search", "2",
         "--block-ms", "1", "--rounds", "1"),
        30, 60, csv=f"{GPU}/quantizers.csv", inputs=("fpk/kernels/quant",),
    ),
    Measurement(
        "method", "a layer through its method beside the bare function",
        bench("moe_method", "--csv", "{out}/moe-method.csv"),
        ("moe_method", "--csv", "{out}/moe-method.csv", "--tiny", "--tokens", "1", "--rounds", "1"),
        40, 80, csv=f"{GPU}/moe-method.csv", inputs=("fpk/methods", "fpk/_moe.py"),
    ),
    Measurement(
        "exactness", "quantizers against their references, 10^8 values",
        bench("exactness", "--csv", "{out}/exactness.csv"),
        ("exactness", "--csv", "{out}/exactness.csv", "--values", "10", "--ops", "amax"),
        200, 400, quiet=False, csv=f"{GPU}/exactness.csv", inputs=("fpk/kernels/quant",),
    ),
    Measurement(
        "exactness_nvfp4", "NVFP4 quantizers against their references, 10^8 values",
        bench("exactness", "--csv", "{out}/exactness.csv", "--ops", *NVFP4),
        ("exactness", "--csv", "{out}/exactness.csv", "--values", "10", "--ops", "quantize_nvfp4"),
        60, 120, quiet=False, csv=f"{GPU}/exactness.csv", inputs=("fpk/kernels/quant",),
    ),
    Measurement(
        "loading", "memory while experts load", bench("loading", "--csv", "{out}/loading.csv"),
        ("loading", "--csv", "{out}/loading.csv", "--layers", "2"),
        30, 60, quiet=False, csv=f"{GPU}/loading.csv", inputs=("fpk/methods",),
    ),
)  # fmt: skip
