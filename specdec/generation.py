"""The result of ``generate``: texts, ids and statistics of every row."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.stats import Stats


@dataclass(frozen=True, eq=False)
class Generation(Sequence[Any]):
    """The output in the order of the prompts: a sequence of the rows' texts, or of their ids without a tokenizer.

    Attributes:
        ids: generated ids of each row (without the prompt, with the token that ended it). texts: decoded, or ``None``
            without a tokenizer. prompt_ids: the prompts' ids. finish: why each row ended: ``"length"``, ``"eos"``,
            ``"stop_string"`` or ``"criteria"``.
        stats: of the whole batch. row_stats: counts of each row (no seconds: a batch shares them). arms: names of a pool's arms.
    """

    ids: list[list[int]]
    texts: list[str] | None
    prompt_ids: list[list[int]]
    finish: list[str]
    stats: Stats
    row_stats: list[Stats]
    arms: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: Any) -> Any:
        """The text of a row (its ids without a tokenizer), or a list of texts for a slice of rows."""
        return (self.ids if self.texts is None else self.texts)[row]

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary for each row; of a pool, with the rounds of each arm."""
        return [
            {
                "row": b,
                "prompt_tokens": len(self.prompt_ids[b]),
                "new_tokens": len(self.ids[b]),
                "finish": self.finish[b],
                "lossless": s.lossless,
                "tau": s.tau,
                "rounds": s.rounds,
                "drafted": s.drafted,
                "accepted": s.accepted,
                **{f"rounds_{name}": s.arms[a] for a, name in enumerate(self.arms)},
                **({"text": self.texts[b]} if self.texts is not None else {}),
            }
            for b, s in enumerate(self.row_stats)
        ]

    def frame(self) -> Any:
        """A ``pandas.DataFrame`` with one row for each prompt."""
        try:
            import pandas
        except ImportError as missing:
            raise ImportError("frame() needs pandas: pip install pandas (or use rows())") from missing
        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        s = self.stats
        return (
            f"Generation({len(self)} rows, {s.tokens} tokens, {s.shown_tau}, "
            f"{s.accepted}/{s.drafted} drafted accepted, {s.tokens_per_second:.0f} tokens/s{'' if s.lossless else ', lossy'})"
        )

    def _repr_html_(self) -> str:
        rows = self.rows()
        head = "".join(f"<th>{html.escape(k)}</th>" for k in rows[0])
        body = "".join(
            "<tr>"
            + "".join(
                f"<td style='text-align:left'>{html.escape(f'{v:.2f}' if isinstance(v, float) else str(v)[:200])}</td>"
                for v in row.values()
            )
            + "</tr>"
            for row in rows
        )
        return f"<p>{html.escape(repr(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
