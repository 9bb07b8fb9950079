"""Prompts from the corpus's held-out packages, shipped so that results do not depend on what is installed.

Those of the test packages are for results; those of the validation packages are for every choice that is made before.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from .corpus import DOMAINS

FILES = {
    "test": Path(__file__).with_name("prompts.json"),
    "validation": Path(__file__).with_name("prompts_validation.json"),
}


@cache
def entries(split: str = "test") -> tuple[dict[str, str], ...]:
    """The shipped prompts of a split and their origin: text, domain, package, path, licence.

    Raises:
        ValueError: a split other than "test" and "validation".
    """
    if split not in FILES:
        raise ValueError(
            f"split must be one of {tuple(FILES)}, not {split!r}: no prompts are cut from others"
        )
    return tuple(json.loads(FILES[split].read_text())["prompts"])


def prompts(
    domain: str | None = None,
    n: int | None = None,
    tokens: int | None = None,
    tokenizer: Any = None,
    split: str = "test",
) -> list[str]:
    """The held-out prompts of a domain, or of all domains alternately (code, prose, tabular, code, …).

    `n` limits their number. `tokens` cuts each to its first `tokens` tokens under `tokenizer` (a Hugging Face fast
    tokenizer); shorter prompts are left out, so that all have the same length. The longest prompt has about 1100 tokens of
    the pocket models' tokenizer. `split` is "test", or "validation" for prompts to choose drafts and settings on.
    """
    if domain not in (None, *DOMAINS):
        raise ValueError(f"domain must be None or one of {DOMAINS}, not {domain!r}")
    if tokens is not None and tokenizer is None:
        raise ValueError("`tokens` counts tokens of a tokenizer: pass `tokenizer=` too")
    if (n is not None and n < 1) or (tokens is not None and tokens < 1):
        raise ValueError(f"n and tokens must be at least 1, not {n} and {tokens}")
    texts = [entry["text"] for entry in entries(split) if domain in (None, entry["domain"])]
    if tokens is not None:
        texts = [cut for text in texts if (cut := _cut(text, tokens, tokenizer)) is not None]
    if n is not None and n > len(texts):
        wanted = f"{n} prompts" + (f" of {tokens} tokens" if tokens else "")
        raise ValueError(
            f"there are only {len(texts)} of the {wanted} asked for (domain {domain!r}, split {split!r}): ask for fewer"
        )
    return texts[:n]


def _cut(text: str, tokens: int, tokenizer: Any) -> str | None:
    """The text of the first `tokens` tokens, cut at a character's edge, or None for a shorter text."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if len(encoded["input_ids"]) < tokens:
        return None
    return text[: encoded["offset_mapping"][tokens - 1][1]]


def choose(
    rows: Iterable[dict[str, str]],
    licences: dict[str, str],
    tokenizer: Any,
    count: int = 24,
    tokens: int = 1100,
) -> list[dict[str, str]]:
    """Picks prompts from the rows of a split, at most `count` a domain and equally many of each: first the start of every
    document, packages in turn, then later parts of long documents (there are few large tables, and they are long)."""
    rows = list(rows)
    chosen: dict[str, list[dict[str, str]]] = {}
    for domain in DOMAINS:
        candidates: list[tuple[int, int, dict[str, str]]] = []
        for row in sorted((row for row in rows if row["domain"] == domain), key=lambda row: row["sha256"]):
            text, part = row["text"], 0
            while (cut := _cut(text, tokens, tokenizer)) is not None and part < 6:
                source = {"package": row["package"], "path": row["path"], "licence": licences[row["package"]]}
                turn = sum(c[0] == part and c[2]["package"] == row["package"] for c in candidates)
                candidates.append((part, turn, {"domain": domain, **source, "text": cut}))
                rest = text[len(cut) :]
                text, part = rest[rest.find("\n") + 1 :], part + 1
        candidates.sort(key=lambda candidate: candidate[:2])
        chosen[domain] = [entry for _, _, entry in candidates[:count]]
    # As many groups as the smallest domain has.
    return [entry for group in zip(*chosen.values()) for entry in group]
