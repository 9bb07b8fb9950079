"""How often a round waits for the device, and what it says of wrong results; a fake device stands for a real one."""

from __future__ import annotations

import warnings

import pytest
import torch
from fake_device import FakeDevice, onto
from stepped import DRAFTS, builder_of
from tiny import tiny

import specdec as sd


@pytest.mark.parametrize(
    ("draft", "verifier", "temperature"),
    [
        *(("none", sd.Coupled, 1.0), ("model", sd.Rejection, 0), ("tree", sd.Rejection, 1.0)),
        *(("model", sd.verifiers.FusedRejection, 1.0), ("ngram", sd.BlockVerification, 1.0)),
        *(("magicdec", sd.Rejection, 1.0), ("spire", sd.Rejection, 1.0)),
        *(
            pytest.param(draft, sd.Rejection, temperature, marks=pytest.mark.slow)
            for draft, temperature in (("none", 0), ("none", 1.0), ("model", 1.0), ("tree", 0), ("spire", 0))
        ),
        *(
            pytest.param(draft, verifier, 1.0, marks=pytest.mark.slow)
            for draft, verifier in (
                ("model", sd.Coupled),
                ("model", sd.BlockVerification),
                ("ngram", sd.Rejection),
            )
        ),
    ],
)
def test_a_round_waits_once(draft, verifier, temperature):
    def decoder(*where):
        return builder_of(draft, *where).verifier(verifier()).sampling(temperature=temperature).build()

    prompts = [[1, 2, 3, 4], [7, 8]]
    expected = decoder().generate(prompts, 10, seed=3).ids
    for graphs in (False, "eager"):
        seen: list[int] = []
        with FakeDevice() as device:

            def note(_, device=device, seen=seen):
                seen.append(device.waits.total())

            said = decoder(graphs, onto).generate(prompts, 10, seed=3, on_round=note).ids
        middle = len(seen) // 2
        assert seen[middle] - seen[middle - 1] == 1, device.waits
        assert said == expected


@pytest.mark.parametrize("draft", ["model", "spire"])
@pytest.mark.parametrize(
    ("graphs", "costs", "waits"), [(False, "wall", 2), ("eager", "wall", 2), ("eager", "modelled", 1)]
)
def test_a_pool_waits_until_its_draft_has_drafted(draft, graphs, costs, waits):
    """Captured chains defer no check, yet seconds that a selector is charged must be those of the work and not of the launch."""
    seen = []
    with FakeDevice() as device:
        alone = builder_of(draft, graphs, onto).build()
        pool = {"draft": sd.Arm(alone.draft, 3), "none": sd.Arm(None)}
        decoder = sd.decoder(alone.target).pool(pool, sd.selectors.Fixed(0), costs=costs).build()
        note = lambda _: seen.append(device.waits.total())  # noqa: E731
        decoder.generate([[1, 2, 3, 4], [7, 8]], 20, seed=3, on_round=note)
    middle = len(seen) // 2
    assert seen[middle] - seen[middle - 1] == waits, device.waits


def test_a_served_round_waits_once():
    seen = []
    with FakeDevice() as device:
        decoder = builder_of("model", "eager", onto).sampling(temperature=1.0).build()
        requests = [sd.Request([1, 2, 3, 4], 10), sd.Request([7, 8], 10)]
        note = lambda _: seen.append(device.waits.total())  # noqa: E731
        served = list(decoder.serve(requests, seed=3, on_round=note))
    middle = len(seen) // 2
    assert len(served) == 2
    assert seen[middle] - seen[middle - 1] == 1


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("graphs", [False, "eager"])
@pytest.mark.parametrize("who", ["target", "model"])
def test_a_device_that_says_nan(who, graphs, temperature):
    with FakeDevice():
        decoder = builder_of("model", graphs, onto).sampling(temperature=temperature).build()
        model = decoder.target if who == "target" else decoder.draft.model
        committed = []

        def spoil(round):
            committed.append(int(round.committed.sum()))
            if round.number == 4:
                with torch.no_grad():
                    model.model.lm_head.weight.fill_(float("nan"))

        with pytest.raises(ValueError, match=r"logits of row 0, entry 0 contain nan|draft proposes -1 where"):
            decoder.generate([[1, 2, 3, 4], [7, 8]], 40, seed=3, on_round=spoil)
    assert len(committed) == 5  # nothing after that


@pytest.mark.parametrize(
    ("tokens", "probs", "why"),
    [(200, None, "outside the target's vocabulary"), (3, 2.0, "row 0, node 0 sum to"), (3, -1.0, "sum to")],
)
def test_what_is_wrong_with_a_draft_on_a_device(tokens, probs, why):
    class Wrong:
        name = "wrong"

        def init(self, context, target_cache):
            return None

        def propose(self, state, context, budget, rng):
            B, N = context.batch, int(budget.max())
            distribution = None if probs is None else torch.full((B, N, 97), probs, device="meta")
            drafted = torch.full((B, N), tokens, device="meta")
            return sd.Proposal.chain(
                drafted, budget, distribution, None if distribution is None else "sampled"
            ), None

        def observe(self, state, round):
            return state

        def select(self, state, rows):
            return state

    with FakeDevice():
        decoder = sd.decoder(sd.HFModel(onto(tiny("llama", 0, torch.float32)))).draft(Wrong(), 2).build()
        with pytest.raises(ValueError, match=why):
            decoder.generate([[1, 2, 3]], 8, seed=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_round_waits_once_on_a_gpu(draft):
    """As on the fake device, by PyTorch's own watch; and texts are the same with captured steps."""
    said = []
    for graphs in (False, True):
        decoder = builder_of(draft, graphs, lambda model: model.cuda()).sampling(temperature=1.0).build()
        seen: list[int] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            def note(_, caught=caught, seen=seen):
                seen.append(sum("synchronizing" in str(w.message) for w in caught))

            try:
                torch.cuda.set_sync_debug_mode("warn")  # which warns that it is a prototype
                said.append(decoder.generate([[1, 2, 3, 4], [7, 8]], 32, seed=3, on_round=note).ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        middle = len(seen) // 2
        assert seen[middle] - seen[middle - 1] == 1
    assert said[0] == said[1]


def every_second(ids, scores):
    """A processor: no odd token."""
    odd = torch.arange(scores.shape[-1], device=scores.device) % 2 == 1
    return scores.masked_fill(odd, -torch.inf)


def letters(vocab):
    """A grammar in which tokens below 40 alternate with all others."""
    return sd.grammars.Table(
        [[int(t < 40) for t in range(vocab)], [-1 if t < 40 else 0 for t in range(vocab)]]
    )


OWN = {
    "temperatures": ([sd.Sampling(0.7), sd.Sampling(0.9)], 1),
    "greedy": ([sd.Sampling(0), sd.Sampling(0.9)], 1),
    "truncations": ([sd.Sampling(0.7, top_p=0.9), sd.Sampling(0.9, top_k=5)], 1),
    "processors": ([sd.Sampling(0.7, processors=(every_second,)), sd.Sampling(0.9)], None),
    "grammars": ([sd.Sampling(0.7, grammar=letters(97)), sd.Sampling(0.9)], None),
}
"""The samplings of two requests, and how often a round waits (``None``: more often)."""


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("draft", ["model", "tree"])
def test_requests_with_samplings_of_their_own_run_on_a_device(draft, kind):
    samplings, waits = OWN[kind]
    requests = [sd.Request(p, 10, sampling=s) for p, s in zip([[1, 2, 3, 4], [7, 8]], samplings)]

    def served(decoder, note=None):
        said = decoder.serve(requests, seed=3, on_round=note, own_sampling=True, errors="yield")
        done = sorted(said, key=lambda one: one.index)
        for one in done:
            if one.error is not None:
                raise one.error
        return [one.ids for one in done]

    expected, seen = served(builder_of(draft).build()), []
    with FakeDevice() as device:
        note = lambda _: seen.append(device.waits.total())  # noqa: E731
        assert served(builder_of(draft, "eager", onto).build(), note) == expected
    middle = len(seen) // 2
    assert waits is None or seen[middle] - seen[middle - 1] == waits, device.waits


def test_grammars_are_sent_as_bits():
    from specdec.grammars.tracker import on_device, unpacked

    for vocab, width in [(90, 12), (64, 8), (13, 2), (7, 3)]:
        bits = torch.randint(0, 256, (5, width), dtype=torch.uint8).numpy()
        with FakeDevice() as device:
            there = on_device(bits, vocab, torch.device("meta"))
            assert there.shape == (5, vocab)
            assert not device.waits
            assert there.cpu().tolist() == unpacked(bits, vocab).tolist()


def test_a_few_rows_of_many_run_by_a_captured_step():
    """One row that still draws, among rows that do not, is fed from the proposal of all rows."""
    with FakeDevice():
        model = sd.HFModel(onto(tiny("llama")), graphs="eager")
        rows, nodes = 40, 40
        context = sd.Context.of([[1, 2, 3]] * rows, 64)
        cache = model.cache(rows, 64)
        model.prefill(cache, context)
        size = torch.zeros(rows, dtype=torch.long)
        size[5] = nodes
        tokens = torch.zeros(rows, nodes, dtype=torch.long).to("meta")
        proposal = sd.Proposal(tokens, torch.arange(-1, nodes - 1).repeat(rows, 1), size)
        calls = len(model.steps._storages[0].programs)
        for _ in range(2):
            model.score(cache, context, proposal, rows=torch.tensor([5]))
        assert len(model.steps._storages[0].programs) > calls


@pytest.mark.parametrize("which", ["grammar", None])
def test_what_was_drafted_is_read_before_the_forward(monkeypatch, which):
    """By grammars, which then work beside it."""
    settings = {"grammar": letters(97)}
    read, score = [], sd.HFModel.score
    with FakeDevice():
        decoder = builder_of("model", False, onto).sampling(
            temperature=1.0, **({which: settings[which]} if which else {})
        ).build()  # fmt: skip

        def noted(self, cache, context, proposal=None, *more, **options):
            if self is decoder.target and proposal is not None:
                read.append("ids" in vars(proposal))
            return score(self, cache, context, proposal, *more, **options)

        monkeypatch.setattr(sd.HFModel, "score", noted)
        decoder.generate([[1, 2, 3, 4], [7, 8]], 10, seed=3)
    assert set(read) == {which is not None}
