"""A parallel draft: one forward over mask tokens drafts a chain, training computes the same laws, and texts are the target's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny import byte_tokenizer, tiny

import specdec as sd
from specdec import drafts, lab
from specdec.cost.arms import ArmCosts
from specdec.drafts import Model, Parallel
from specdec.drafts.heads import DDTree, StaticTree
from specdec.drafts.stops import Rule
from specdec.executors import Optimistic, Pipelined
from specdec.models import Windowed
from specdec.training.forward import Parallel as Ordinary
from specdec.training.parallel_blocks import ParallelBlocks, with_mask_token
from specdec.training.states import Batch
from specdec.training.train import Settings, train

PROMPTS = [[5, 9, 61, 3], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
MASK = 97  # an id of its own, after the target's


def small(family="llama", seed=2, **changed):
    """A model with a mask token, in float64, whose mask token matters."""
    model = with_mask_token(tiny(family, seed=seed, **changed).double())
    with torch.no_grad():
        model.get_input_embeddings().weight[MASK] = torch.linspace(-1, 1, model.config.hidden_size).double()
    return model


@pytest.fixture(scope="module")
def target():
    return sd.HFModel(tiny("llama", seed=1).double())


def draft_of(model):
    return Parallel(sd.HFModel(model, byte_tokenizer()))


def target_of(model):
    return sd.HFModel(model.model, byte_tokenizer())


def chains_of(rounds, out):
    """Every chain that was drafted for ``PROMPTS``: the text before it, and the laws of its tokens ``[size, V]``."""
    for request, prompt in enumerate(PROMPTS):
        text = prompt + out.ids[request]
        for r in rounds[1:]:
            row = r.context.request.tolist().index(request) if request in r.context.request else -1
            if row >= 0 and (size := int(r.proposal.size[row])):
                laws = torch.stack([r.proposal.q(n)[row] for n in range(size)])
                yield text[: int(r.context.length[row])], laws


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_the_laws_are_those_of_transformers_forward_with_mask_tokens(target, family):
    model, rounds = small(family), []
    decoder = sd.decoder(target_of(target)).draft(draft_of(model), length=4).build()
    out = decoder.generate(PROMPTS, [20, 14, 17], seed=0, on_round=rounds.append)
    found = list(chains_of(rounds, out))
    assert len(found) > 15
    for text, laws in found:
        said = text + [MASK] * (len(laws) - 1)
        with torch.no_grad():
            logits = model(torch.tensor([said])).logits[0, -len(laws) :, :MASK]
        torch.testing.assert_close(laws.double(), logits.softmax(-1), rtol=0, atol=1e-6)


def test_a_round_is_one_forward(target, monkeypatch):
    draft, calls = draft_of(small()), []
    before = draft.model.score
    monkeypatch.setattr(draft.model, "score", lambda *a, **b: calls.append(1) or before(*a, **b))
    rounds = []
    decoder = sd.decoder(target_of(target)).draft(draft, length=6).build()
    decoder.generate(PROMPTS[:1], 20, seed=0, on_round=rounds.append)
    assert len(calls) == sum(int(r.proposal.size[0]) > 0 for r in rounds)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.greedy(),
        lambda b: b.verifier(sd.Coupled()),
        lambda b: b.verifier(sd.Coupled()).executor(Optimistic()),
        lambda b: b.verifier(sd.Coupled()).executor(Pipelined(2)),
        lambda b: b.verifier(sd.Coupled()).sampling(temperature=[0.0, 1.0, 0.7], top_k=[None, 5, 9]),
    ],
    ids=["greedy", "coupled", "optimistic", "pipelined", "each request"],
)
@pytest.mark.parametrize("windowed", [False, True])
def test_texts_are_those_of_plain_decoding(target, change, windowed):
    model = target_of(target)
    draft = draft_of(small())
    if windowed:
        draft = Parallel(Windowed(draft.model, window=6, sinks=1))
    base = change(sd.decoder(model))
    out = base.draft(draft, length=4).build().generate(PROMPTS, [20, 14, 17], seed=3)
    plain = base.draft(drafts.NoDraft()).executor(sd.executors.Serial()).build()
    assert out.ids == plain.generate(PROMPTS, [20, 14, 17], seed=3).ids
    assert sum(s.drafted for s in out.row_stats) > 20


def test_streams_and_chains_that_end_early(target):
    base = sd.decoder(target_of(target)).verifier(sd.Coupled())
    draft = Parallel(draft_of(small()).model, stop=0.013)
    decoder = base.draft(draft, length=4).build()
    requests = [sd.Request(p, 12, seed=n) for n, p in enumerate(PROMPTS)]
    texts = [
        {done.index: done.ids for done in one.serve(requests, limit=2)} for one in (decoder, base.build())
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == len(PROMPTS)
    sizes = []
    decoder.generate(PROMPTS, 20, seed=0, on_round=lambda r: sizes.extend(r.proposal.size.tolist()))
    assert {1, 4} <= set(sizes)


def test_answers_are_kept_without_mask_tokens(target):
    """The next turn of a conversation drafts as without a prefix cache."""
    drafted, found = [], []
    for memory in (None, 2**24):
        rounds, small_model = [], sd.HFModel(small(), byte_tokenizer(), prefix_cache=memory)
        decoder = sd.decoder(target_of(target)).draft(Parallel(small_model), length=4).build()
        prompts = [[7, 9, 61, 3] * 5, [5] * 33]
        out = decoder.generate(prompts, [90, 80], seed=1)
        turns = [prompt + ids + [1, 2, 3] for prompt, ids in zip(prompts, out.ids)]
        decoder.generate(turns, 12, seed=2, on_round=rounds.append)
        drafted.append([r.proposal.tokens.tolist() for r in rounds])
        found.append(0 if small_model.prefixes is None else small_model.prefixes.found)
    assert drafted[0] == drafted[1]
    assert found[1] >= 128  # of 53 tokens of prompts, and 170 of answers


@pytest.mark.parametrize("temperature", [0.0, 1.0, [0.0, 1.0, 0.7]])
def test_tokens_that_are_drawn_together_are_those_drawn_one_after_another(target, temperature):
    """A rule that ends no chain makes the draft draw token by token."""
    drafted = []
    for stop in ((), Rule("after", lambda seen: torch.zeros(len(seen.own), dtype=torch.bool))):
        rounds = []
        base = sd.decoder(target_of(target)).sampling(temperature=temperature)
        decoder = base.draft(replace(draft_of(small()), stop=stop), length=5).build()
        decoder.generate(PROMPTS, [20, 14, 17], seed=3, on_round=rounds.append)
        drafted.append([(r.proposal.tokens.tolist(), r.proposal.probs) for r in rounds])
    for (tokens, q), (others, other_q) in zip(*drafted, strict=True):
        assert tokens == others
        assert (q is None) == (other_q is None)
        if q is not None:
            torch.testing.assert_close(q, other_q, rtol=0, atol=0)


def test_a_replay_knows_its_chances(target, tmp_path):
    model = target_of(target)
    trace = lab.record(model, PROMPTS, tmp_path, new_tokens=24, k=3, eos_token_id=(), progress=False)
    replayed = lab.replay(trace, draft_of(small()), 3, target=model, cache=False)
    one = lab.replay(trace, Model(draft_of(small()).model), 3, target=model, cache=False)
    torch.testing.assert_close(
        replayed.accept[..., 0], one.accept[..., 0]
    )  # no mask token is read before the first
    assert not torch.allclose(replayed.accept[..., 1], one.accept[..., 1])


def test_models_whose_config_names_a_mask_token_draft_in_parallel(target, tmp_path):
    model = small()
    model.save_pretrained(tmp_path / "draft")
    byte_tokenizer().save_pretrained(tmp_path / "draft")
    base = sd.decoder(target_of(target))
    assert isinstance(base.draft(str(tmp_path / "draft")).build().draft, Parallel)
    assert isinstance(base.draft((model, byte_tokenizer())).build().draft, Parallel)
    assert type(base.draft((tiny("llama", seed=2), byte_tokenizer())).build().draft) is Model
    decoder = base.draft(draft_of(model), length=3).build()
    decoder.save(tmp_path / "saved")
    again = sd.load(tmp_path / "saved").build()
    assert again.draft.mask_token == MASK
    assert again.generate(PROMPTS, 12, seed=1).ids == decoder.generate(PROMPTS, 12, seed=1).ids


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (None, ValueError, "mask_token is not given, and the model's config has no pard_token"),
        (97, ValueError, "mask_token is 97: the model has ids from 0 to 96"),
        (-1, ValueError, "mask_token is -1"),
        (True, TypeError, "mask_token is True: give a whole number"),
    ],
)
def test_a_mask_token_that_does_not_exist_is_refused(target, mask, error, message):
    with pytest.raises(error, match=message):
        Parallel(target, mask)


def test_a_translated_model_is_refused():
    translated = drafts.Translated((tiny("llama"), byte_tokenizer()), byte_tokenizer())
    with pytest.raises(TypeError, match="has no text"):
        Parallel(translated, 3)


def wanted_paths(tree, best):
    """The paths of a tree over the best tokens of each depth, ``best``: depth -> ``(log-probabilities, ids)``, descending."""
    if isinstance(tree, StaticTree):
        return {tuple(best[d][1][rank] for d, rank in enumerate(path)) for path in tree.paths}
    every = [path for d in range(len(best)) for path in product(range(tree.total), repeat=d + 1)]
    scores = {path: sum(best[d][0][rank] for d, rank in enumerate(path)) for path in every}
    chosen = sorted(scores, key=scores.__getitem__)[-tree.total :]
    return {tuple(best[d][1][rank] for d, rank in enumerate(path)) for path in chosen}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [DDTree(9), StaticTree.of_widths((3, 2, 1))], ids=["best", "static"])
def test_trees_are_grown_from_one_forward(target, tree, temperature, monkeypatch):
    model, small_model = target_of(target), small()
    draft, calls, rounds = replace(draft_of(small_model), tree=tree), [], []
    base = sd.decoder(model).sampling(temperature=temperature).verifier(sd.Coupled())
    before = draft.model.score
    monkeypatch.setattr(draft.model, "score", lambda *a, **b: calls.append(1) or before(*a, **b))
    out = base.draft(draft, length=3).build().generate(PROMPTS, [20, 14, 17], seed=3, on_round=rounds.append)
    assert out.ids == base.build().generate(PROMPTS, [20, 14, 17], seed=3).ids
    assert len(calls) == sum(bool((r.proposal.size > 0).any()) for r in rounds)
    r = rounds[2]
    for row in range(r.context.batch):
        said = r.context.row(row) + [MASK] * 2
        laws = small_model(torch.tensor([said])).logits[0, -3:, :MASK].log_softmax(-1).topk(9)
        best = list(zip(laws.values.tolist(), laws.indices.tolist()))
        paths: list[tuple[int, ...]] = []
        for n in range(int(r.proposal.size[row])):
            parent, token = int(r.proposal.parents[row, n]), int(r.proposal.tokens[row, n])
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert set(paths) == wanted_paths(tree, best)


class Never:
    """Forbids an id."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.token] = float("-inf")
        return scores


def test_first_tokens_of_trees_follow_processors(target):
    """Of later tokens the text before is not known. Rows without a budget have no nodes."""
    model, draft = target_of(target), replace(draft_of(small()), tree=DDTree(6))

    def firsts(**settings):
        rounds = []
        base = sd.decoder(model).sampling(temperature=0.0, **settings)
        out = (
            base.draft(draft, length=3).build().generate(PROMPTS, [20, 1, 17], seed=3, on_round=rounds.append)
        )
        assert out.ids == base.build().generate(PROMPTS, [20, 1, 17], seed=3).ids
        p = rounds[1].proposal
        return [
            [t for t, up, n in zip(p.tokens[b], p.parents[b], range(int(p.size[b]))) if up < 0]
            for b in range(len(p.size))
        ]

    best = int(firsts()[0][0])
    assert all(best not in row for row in firsts(processors=[Never(best)]))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"tree": 3}, TypeError, "tree is 3: give heads.DDTree"),
        ({"tree": DDTree}, TypeError, "tree is"),
        ({"tree": DDTree(3), "stop": 0.4}, ValueError, "stop ends chains, and tree is given"),
        (
            {"tree": StaticTree(tuple((n,) for n in range(99)))},
            ValueError,
            "tree has a rank of 98, and there are 97 ids",
        ),
    ],
)
def test_what_is_no_tree_is_refused(target, settings, error, message):
    with pytest.raises(error, match=message):
        sd.decoder(target).draft(Parallel(target, 3, **settings)).build()


# -- training ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
@pytest.mark.parametrize("k", [1, 5])
def test_training_computes_what_decoding_does(family, k):
    model = small(family)
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    made = ParallelBlocks(k)(model, Batch(tokens, {}, torch.zeros(2, 23, 8)))
    assert made.logits.shape == (2, len(made.at[0]), k, 128)
    for b, block in ((0, 0), (1, 2)):
        anchor = int(made.at[b, block, 0])
        said = torch.cat([tokens[b, : anchor + 1], torch.full((k - 1,), MASK)])
        wanted = model(said[None]).logits[0, -k:]
        torch.testing.assert_close(
            made.logits[b, block], wanted, rtol=0, atol=2e-6
        )  # norms compute in float32
    assert model.config._attn_implementation != "specdec_blocks"


def test_training_raises_what_it_is_trained_for():
    """A text in which each token follows from the one before: a model that was not trained for it knows the first token of a block alone."""
    target = tiny("llama", seed=1)
    draw = torch.Generator().manual_seed(0)
    data = (torch.randint(0, 97, (64, 1), generator=draw) + 3 * torch.arange(25)) % 97
    train(target, tiny("llama", seed=9), data, settings=Settings(60, 8, precision=torch.float32), forward=Ordinary(),
          loss=sd.training.losses.HardLoss(), progress=False)  # fmt: skip
    draft = with_mask_token(tiny("llama", seed=1))
    report = train(
        draft,
        target,
        data,
        settings=Settings(60, 8, precision=torch.float32),
        validation=data[:8],
        progress=False,
    )
    row = report.curve[-1]
    assert "acceptance_8" in row  # by default blocks of 8, since the config names a mask token
    assert row["acceptance_8"] > 0.3


@pytest.mark.parametrize("family", ["granite", "cohere2", "falcon"])
def test_models_that_compute_something_else_are_refused(family):
    draft = with_mask_token(tiny(family), 96)
    with pytest.raises(ValueError, match=r"computes more than this forward|does not take what this forward"):
        train(
            draft,
            tiny("llama"),
            torch.zeros(8, 20, dtype=torch.long),
            settings=Settings(1, 2),
            progress=False,
        )


def test_the_last_id_of_the_target_may_be_the_mask_token():
    draft = with_mask_token(tiny("llama", seed=2), 96)
    report = train(
        draft, tiny("llama"), torch.zeros(8, 20, dtype=torch.long), settings=Settings(1, 2), progress=False
    )
    assert report.tokens == 38


def test_what_it_costs_does_not_depend_on_its_tokens(target):
    """Modelled costs: one forward a round, as of heads that draft a block in one pass."""
    draft = draft_of(small())
    costs = ArmCosts.of(target, [draft, Model(draft.model), drafts.NoDraft()])
    assert costs.once == (True, False, False)
    seconds = costs.seconds(torch.tensor([0, 0, 1, 2]), torch.tensor([5, 0, 5, 0])) - 1
    assert seconds.tolist() == pytest.approx([costs.draft[0], 0, 5 * costs.draft[0], 0])
    with pytest.raises(ValueError, match="once of 1"):
        ArmCosts((0.5, 0.5), once=(True,))


def test_mask_tokens_are_named_in_the_config():
    model = tiny("llama", seed=2)
    assert with_mask_token(model, 90) is model
    assert with_mask_token(sd.HFModel(model)).config.pard_token == 90  # it keeps the one that it has
    assert model.config.pard_token == 90
    assert len(model.get_input_embeddings().weight) == 97
    with pytest.raises(ValueError, match="mask_token is 97: the draft has ids from 0 to 96"):
        with_mask_token(model, 97)
    with pytest.raises(ValueError, match="mask_token is -1"):
        with_mask_token(model, -1)
    model.config.pard_token = 120
    with pytest.raises(ValueError, match="the config's pard_token is 120: the model has ids"):
        Parallel(sd.HFModel(model))
    model.config.pard_token = -1  # as AMD's trainer writes where there is none
    assert (
        type(sd.decoder(target_of(sd.HFModel(tiny("llama")))).draft((model, byte_tokenizer())).build().draft)
        is Model
    )
    with pytest.raises(TypeError, match="mask_token is '5': give a whole number"):
        ParallelBlocks(2, mask_token="5").mask_of(model)
    with pytest.raises(ValueError, match="with_mask_token"):
        ParallelBlocks(2)(tiny("llama"), Batch(torch.zeros(1, 9, dtype=torch.long), {}, torch.zeros(1, 8, 8)))
