"""The host's time of a round, with the models' work removed: what a device waits for when its kernels take no time.

Steps are captured as on a GPU, and a replay returns prepared results without computing anything: the draft's tokens, and logits by which
rows accept 0 to 4 tokens. With `Serial`, sampled rows and those with a head's tree accept other numbers of tokens. There, SPIRe and heads also read the target's activations
outside their steps, and heads grow their trees there; that is computed.
What remains is the work of Python and of small tensors on the host, by the CPU clock of the thread. On a GPU the same work also launches kernels
and copies, which is not included. Cases take turns, and medians are over rounds.

    python -m recipes.gpu.host --batches 1 16 64 --json docs/results/host.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, product
from math import prod
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

import specdec as sd
from recipes.gpu.steps import config
from specdec.drafts.heads import DynamicTree, Eagle3
from specdec.drafts.heads.captured import HeadChain
from specdec.drafts.spire import SpireModel
from specdec.executors import Ahead, Serial
from specdec.graphs.chain import Chain
from specdec.graphs.ring_chain import RingChain
from specdec.graphs.static import StaticStep
from specdec.graphs.whole_round import ACCEPTED, DRAWN, FINITE, TOKENS, WholeRound
from specdec.lab import report
from specdec.lab.captured import keepers

K, TOKEN, OTHER, SHARE, WIDTHS = 4, 7, 8, 0.7, (2, 2, 1, 1)
# Milliseconds of the first review, before anything was done about them. It did not measure SPIRe, heads and trees.
GIVEN: dict[str, dict[int, float]] = {
    "plain, greedy": {1: 0.50, 16: 0.63, 64: 0.95},
    "a draft, greedy": {1: 0.72, 16: 1.01, 64: 1.68},
    "a draft, sampled": {1: 1.11, 16: 1.53, 64: 1.96},
    **{"SPIRe, greedy": {}, "SPIRe, sampled": {}, "a head, greedy": {}, "a head, sampled": {}},
    **{
        "a tree, greedy": {},
        "a tree, sampled": {},
        "a head's tree, greedy": {},
        "a head's tree, sampled": {},
    },
}


class Still:
    """Captures a body by running it once; a replay returns its results, overwritten with prepared ones.

    Args:
        places: of the last committed token and of each node that the target verifies: the number of tokens before it in the block.
    """

    def __init__(self, places: Sequence[int]):
        self.places, self.queries = places, max(places) + 1

    def __call__(self, body: Any) -> Any:
        out = body()
        program = body.__self__
        if isinstance(program, WholeRound):
            self._round(out[0], program.shape.tree)
        elif isinstance(program, Chain | HeadChain | RingChain):
            tokens, distributions = out
            tokens.fill_(TOKEN)
            if distributions is not None:
                distributions.fill_(0.05 / (distributions.shape[-1] - 1))
                distributions[..., TOKEN] = 0.95
        elif out[0] is not None:
            self._logits(
                out[0], isinstance(program, StaticStep) and program.bucket.queries == len(self.places)
            )
        return lambda: out

    def _round(self, result: Tensor, tree: Any) -> None:
        accepted = (torch.arange(len(result)) + 2) % self.queries
        said = result if tree is None else result[:, : TOKENS + tree.nodes]
        said.fill_(TOKEN)
        said[:, ACCEPTED] = accepted
        said[:, FINITE : DRAWN + 1] = 1
        if tree is None:
            return
        parents = result[0, -tree.nodes :].clone()
        above: list[list[int]] = []  # the path to each node
        for node, up in enumerate(parents.tolist()):
            above.append([*(above[up] if up >= 0 else []), node])
        path = torch.tensor(max(above, key=len))
        said[:, ACCEPTED] = accepted.clamp(max=len(path))
        taken = torch.where(torch.arange(len(path)) < said[:, ACCEPTED, None], path, -1)
        result[:, TOKENS + tree.nodes : -tree.nodes] = -1
        result[:, TOKENS + tree.nodes : TOKENS + tree.nodes + len(path)] = taken
        result[:, -tree.nodes :] = parents

    def _logits(self, logits: Tensor, verified: bool) -> None:
        """Token ``TOKEN`` has the share ``SHARE``, and where a proposal is ``verified``, row b's argmax is another one from place ``(b + 2) % 5`` on."""
        V = logits.shape[-1]
        logits.fill_(torch.tensor((1 - SHARE) / (V - 1)).log())
        logits[:, TOKEN] = torch.tensor(SHARE).log()
        for i in range(len(logits) if verified else 0):
            b, n = divmod(i, len(self.places))
            if self.places[n] >= (b + 2) % (K + 1):
                logits[i, OTHER] = logits[i, TOKEN] + 1e-3


def decoders() -> dict[tuple[str, str], sd.Decoder]:
    """The decoders of ``GIVEN`` with each executor, with replays that compute nothing."""
    made: dict[tuple[str, str], sd.Decoder] = {}
    executors: tuple[Serial | Ahead, ...] = (Serial(), Ahead())
    for name, executor in product(GIVEN, executors):
        target, small = (sd.HFModel(LlamaForCausalLM(config(True, 1)), graphs="eager") for _ in range(2))
        draft: Any = None if name.startswith("plain") else small
        places: Sequence[int] = range(1 if draft is None else K + 1)
        if name.startswith("SPIRe"):
            draft = sd.drafts.Spire(SpireModel.from_target(target, 1), graphs="eager")
        if name.startswith("a head"):
            grower: dict[str, Any] = {"tree": DynamicTree(depth=K)} if "tree" in name else {}
            draft = sd.drafts.Head(Eagle3.from_target(target), **grower, graphs="eager")
        if name.startswith("a tree"):
            draft = sd.drafts.Tree(small, WIDTHS)
            places = [0, *(d + 1 for d in range(K) for _ in range(prod(WIDTHS[: d + 1])))]
        builder = sd.decoder(target)
        builder = builder if draft is None else builder.draft(draft, K)
        builder = builder.greedy() if name.endswith("greedy") else builder
        decoder = made[name, type(executor).__name__] = builder.executor(executor).build()
        for programs in keepers(decoder.target, decoder.draft, small):
            programs.capture = Still(places)
    return made


def gaps(decoder: sd.Decoder, batch: int, rounds: int) -> list[float]:
    """Milliseconds between rounds, without those that capture."""
    marks: list[float] = []
    ids = torch.randint(10, 100, (batch, 32)).tolist()
    new = rounds * (K + 1)

    def mark(_: Any) -> None:
        marks.append(thread_time())
        if len(marks) > rounds:
            raise StopIteration

    with suppress(StopIteration):
        decoder.generate(ids, new, seed=0, eos_token_id=(), on_round=mark)
    return [1e3 * (b - a) for a, b in pairwise(marks[12:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=150, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = decoders()
    cases = list(product(made, args.batches))
    found: dict[Any, list[float]] = {case: [] for case in cases}
    for _ in range(args.turns):
        for case in cases:
            found[case] += gaps(made[case[0]], case[1], args.rounds)
    rows: list[dict[str, Any]] = []
    print("| a round | executor | batch | ms | first review | share |\n|---|---|---|---|---|---|")
    for (name, executor), batch in cases:
        times, before = found[(name, executor), batch], GIVEN[name].get(batch)
        ms = median(times)
        row = {"case": name, "executor": executor, "batch": batch, "ms": ms, "rounds": len(times)}
        rows.append(row | {"review_ms": before, "share": ms / before if before else None})
        share = f"{ms / before:.2f}" if before else ""
        print(f"| {name} | {executor} | {batch} | {ms:.3f} | {before or ''} | {share} |")
    if args.json is not None:
        report.write(args.json, rows, seed=0)


if __name__ == "__main__":
    main()
