"""What SPIRe has not read yet, by brute force: every row's positions are read once, the oldest first, and only where its row is drafted."""

from __future__ import annotations

import numpy as np
import torch

from specdec.drafts.spire.unread import Committed, Unread


def test_positions_are_read_once_while_rows_come_and_go():
    kept, draw = 4, np.random.default_rng(0)
    unread, names, ends = Unread.none(3), ["a", "b", "c"], {"a": 10, "b": 20, "c": 30}
    rounds, number, seen = [], 0, 0
    waiting = dict.fromkeys(names, 0)  # the first round that a row has not read
    for step in range(300):
        what = draw.choice(["round", "round", "round", "read", "select", "join"])
        if what == "round":
            row = np.repeat(np.arange(len(names)), draw.integers(1, 4, len(names)))
            position = np.empty_like(row)
            for i, r in enumerate(row):
                position[i] = ends[names[r]]
                ends[names[r]] += 1
            # An activation says whose it is.
            x = torch.tensor(
                [[float(1000 * ord(names[r][0]) + p), float(step)] for r, p in zip(row, position)]
            )
            unread = unread.add(Committed(row.copy(), position, [x, -x]), kept)
            rounds.append([(names[r], int(p)) for r, p in zip(row, position)])
            number += 1
        elif what == "read":
            rows = draw.permutation(len(names))[: draw.integers(0, len(names) + 1)]
            expected = [
                at
                for n, some in enumerate(rounds)
                for at in some
                if n >= number - kept and at[0] in {names[r] for r in rows} and n >= waiting[at[0]]
            ]
            taken, unread = unread.take(rows)
            for r in rows:
                waiting[names[r]] = number
            assert len(unread.rounds) <= max(number - min(waiting[name] for name in names), 0)
            if taken is None:
                assert not expected
                continue
            assert [(names[r], int(p)) for r, p in zip(taken.row, taken.position)] == expected
            first, second = taken.activations
            assert first[:, 0].tolist() == [1000 * ord(name[0]) + p for name, p in expected]
            assert torch.equal(first, -second)
            seen += len(expected)
        elif what == "select" and len(names) > 1:
            rows = draw.permutation(len(names))[: draw.integers(1, len(names) + 1)]
            unread = unread.select(rows)
            names = [names[r] for r in rows]
        elif what == "join" and len(names) < 6:
            new = next(chr(c) for c in range(ord("a"), ord("z")) if chr(c) not in ends or chr(c) == "y")
            if new == "y":
                continue
            names, ends[new], waiting[new] = [*names, new], 5, number
            unread = unread.join(1)
    assert seen > 100
