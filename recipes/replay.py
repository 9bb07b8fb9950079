"""Replayed tokens a round beside those of live decoding, for every way in which a replay is exact.

    python recipes/replay.py --json replay.json

Texts of the pocket target are recorded after held-out prompts, and each part is replayed on them (docs/lab.md). The real decoder then decodes
the same prompts with other seeds. Rows: `part, path, method, live, replayed, standard_errors`: expected and counted tokens a round, and
how many standard errors of their difference they are apart. Selectors are played on the replays of their arms, with random numbers. Rounds of the same prompt are compared, so the differences of prompts do not count.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import checkout  # noqa: F401
import numpy as np
import torch

import specdec as sd
from specdec import lab, selectors, zoo
from specdec.audit.rounds import efficiency
from specdec.drafts import heads
from specdec.drafts.siblings import Distinct
from specdec.drafts.spire import SpireModel
from specdec.drafts.stops import Confidence, MaxProb, Stops
from specdec.lab.console import short_errors, table
from specdec.lab.options import option, parse
from specdec.lab.prompt_file import entries_from, pieces
from specdec.lab.recipe import Recipe
from specdec.lab.selection import Requests, RoundTimes
from specdec.lab.selection_runs import SelectorReplay
from specdec.models import Windowed


@dataclass(frozen=True)
class Settings(Recipe):
    prompts: str | None = option(
        None, "JSON-lines file of prompts (default: the held-out ones)", metavar="FILE"
    )
    context: int = option(96, "tokens of each prompt")
    per_prompt: int = option(2, "prompts cut from one text")
    count: int | None = option(None, "use the first texts only", metavar="N")
    new_tokens: int = option(40, "tokens decoded after the first")
    repeats: int = option(2, "live runs, and recorded texts, of each prompt")
    k: int = option(4, "the longest path of a block")


SECONDS = RoundTimes(((1e-3, 0.0),) * 3, (1e-3, 0.0, 0.0), (0.0,) * 3)  # these selectors do not look at them


class Path(NamedTuple):
    """A way to decode: a part of the decoder, how it is replayed, and the decoder's settings.

    Attributes:
        chances: how a replay's tokens are accepted. policy: the draft's rule, for the replay.
    """

    part: str
    path: str
    method: str
    draft: Any
    verifier: Any = sd.Rejection()
    chances: Literal["rejection", "block"] = "rejection"
    policy: Stops = None


def paths(target: sd.HFModel) -> list[Path]:
    small = sd.HFModel(*zoo.load("pocket-vanilla"))
    spire = SpireModel.from_pretrained(zoo.FOLDER / "pocket-spire", target.model, dtype=torch.float32)
    chain = sd.drafts.Model(small)
    head = heads.load(zoo.FOLDER / "pocket-medusa", target, dtype=torch.float32)
    return [
        Path("draft", "chain", "vanilla", chain),
        Path(
            "draft",
            "chain, cooler draft",
            "vanilla at 0.7",
            sd.drafts.Model(small, sd.Sampling(temperature=0.7)),
        ),
        Path("draft", "masked model", "windowed vanilla", sd.drafts.Model(Windowed(small, 64, 1))),
        Path("draft", "recorded activations", "spire", sd.drafts.Spire(spire)),
        Path("draft", "view of the target", "magicdec", sd.drafts.MagicDec(64, 1)),
        Path("draft", "point masses", "ngram", sd.drafts.NGram()),
        Path("draft", "static tree, independent siblings", "tree 3, 2, 1", sd.drafts.Tree(small, (3, 2, 1))),
        Path(
            "draft",
            "static tree, siblings without replacement",
            "tree 2, 2, 1",
            sd.drafts.Tree(small, (2, 2, 1), siblings=Distinct()),
        ),
        Path(
            "draft",
            "static tree of point masses",
            "Medusa, tree 3, 2, 1",
            sd.drafts.Head(head, heads.StaticTree.of_widths((3, 2, 1))),
        ),
        Path("verifier", "block verification", "vanilla", chain, sd.BlockVerification(), "block"),
        Path("verifier", "traversal, of a chain", "vanilla", chain, sd.Traversal(), "block"),
        Path("verifier", "k-SEQ, of a chain", "vanilla", chain, sd.KSeq()),
        Path("verifier", "optimal transport, of a chain", "vanilla", chain, sd.OptimalTransport()),
        *(
            Path("policy", path, "vanilla", replace(chain, stop=stop), policy=stop)
            for path, stop in (
                ("stops where unsure", MaxProb(0.4)),
                ("stops after an unlikely token", Confidence(0.4)),
            )
        ),
    ]


def main(s: Settings) -> None:
    s.begin()
    target = sd.HFModel(*zoo.load("pocket-target"))
    with short_errors():
        some = pieces(entries_from(s.prompts)[: s.count], target.tokenizer, s.context, s.per_prompt)
    entries = [entry for entry in some for _ in range(s.repeats)]
    prompts = [list(entry.given) for entry in some]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        taps = range(target.model.config.num_hidden_layers)
        trace = lab.record(
            target, entries, folder, s.new_tokens, s.k, None, taps, eos_token_id=(), seed=s.seed
        )
        print(trace)
        for path in paths(target):
            # A policy is applied to the replay of the whole draft.
            draft = path.draft if path.policy is None else sd.drafts.Model(path.draft.model)
            replay = lab.replay(trace, draft, s.k, target)
            replay = replay if path.policy is None else replay.stopping(path.policy)
            accept = replay.chances(path.chances)
            # As live, a text ends after its budget, and blocks near the end are shorter.
            expected = (
                efficiency(accept, cut=True, lengths=replay.size)
                .rounds.numpy()
                .reshape(len(prompts), s.repeats)
            )
            decoder = sd.decoder(target).draft(path.draft, s.k).verifier(path.verifier).build()
            rows.append(row(s, path, expected, counted(s, decoder, prompts)))
            print(table(rows[-1:], COLUMNS), flush=True)
        arms = {
            "vanilla": sd.drafts.Model(sd.HFModel(*zoo.load("pocket-vanilla"))),
            "ngram": sd.drafts.NGram(),
            "none": None,
        }
        replays = {name: arm and lab.replay(trace, arm, s.k) for name, arm in arms.items()}
        play = SelectorReplay(
            Requests.of(replays), SECONDS, len(trace), 8 * s.repeats, s.seed, reward="tokens"
        )
        for selector in (selectors.UCB1(), selectors.Thompson()):
            path = Path("selector", "statistics of a request's own", type(selector).__name__, None)
            expected = play(selector).rounds.mean(0).reshape(len(prompts), s.repeats)
            decoder = sd.decoder(target).pool(arms, selector, s.k).build()
            rows.append(row(s, path, expected, counted(s, decoder, prompts)))
            print(table(rows[-1:], COLUMNS), flush=True)
    print(f"\n{table(rows, COLUMNS)}")
    s.save(rows)


COLUMNS = ("part", "path", "method", "live", "replayed", "standard_errors")


def counted(s: Settings, decoder: sd.Decoder, prompts: list[list[int]]) -> np.ndarray:
    """``[prompts, repeats]`` rounds of the real decoder."""
    return np.stack([live(s, decoder, prompts, repeat) for repeat in range(s.repeats)], 1)


def live(s: Settings, decoder: sd.Decoder, prompts: list[list[int]], repeat: int) -> np.ndarray:
    """``[prompts]`` rounds of one run."""
    rounds: list[int] = []
    for start in range(0, len(prompts), 24):
        batch = prompts[start : start + 24]
        seeds = [1_000_000 * (repeat + 1) + s.seed + start + i for i in range(len(batch))]
        out = decoder.generate(batch, s.new_tokens + 1, seed=seeds, eos_token_id=())
        rounds += [one.rounds for one in out.row_stats]
    return np.array(rounds)


def row(s: Settings, path: Path, expected: np.ndarray, counted: np.ndarray) -> dict[str, Any]:
    """A row of the report, from rounds ``[prompts, repeats]``."""
    differences = expected.mean(1) - counted.mean(1)
    error = differences.std(ddof=1) / len(differences) ** 0.5
    return {
        "part": path.part, "path": path.path, "method": path.method, "live": s.new_tokens / counted.mean(),
        "replayed": s.new_tokens / expected.mean(), "standard_errors": differences.mean() / error, "prompts": len(expected),
        "standard_error_of_rounds": error, "live_rounds": counted.mean(), "replayed_rounds": expected.mean(),
    }  # fmt: skip


if __name__ == "__main__":
    main(parse(Settings, __doc__))
