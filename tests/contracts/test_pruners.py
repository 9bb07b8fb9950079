"""What every pruner promises: of KV on plain tensors, of weights on tiny models. They get here by themselves.

- A *pruner* of KV is a public class with the call of ``specdec.pruning.Pruner``; it is made without arguments, or by
  ``example(model)``.
- A *selection* is a public function that returns ``list[int]`` or ``list[list[int]]``; a *layer budget* is one with a ``budget``.
- A *builder* is a public function ``keep_<what>(model, selection)``.
- An *observation* is a public function ``(model, tokens, length)`` that returns a tensor, ``[layers, ...]``.
- A *score* is any other public function that returns a tensor; tests/test_pruning.py compares those with their definitions.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

import specdec as sd
from contracts import build, modules
from specdec import pruning
from specdec.audit.certify import certify
from specdec.testing import check_pruner
from specdec.testing.pruner import SUITE, B, H, S, arguments

# -- what there is -----------------------------------------------------------------------------------------------------

HELPERS = {"observe", "rebuild"}  # what the parts are made with; nobody else calls it
FOUND: dict[str, Any] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": thing
    for module in modules(pruning)
    for name, thing in vars(module).items()
    if (inspect.isclass(thing) or inspect.isfunction(thing))
    and thing.__module__ == module.__name__
    and not name.startswith("_")
    and module.__name__.rpartition(".")[2] not in HELPERS
}
CALL = list(inspect.signature(pruning.Pruner.__call__).parameters)


def kind(name: str) -> str:
    thing = FOUND[name]
    if inspect.isclass(thing):
        own = hasattr(thing, "needs") and list(inspect.signature(thing.__call__).parameters) == CALL
        return "pruner" if own and not getattr(thing, "_is_protocol", False) else "value"
    parameters, returns = (
        list(inspect.signature(thing).parameters),
        inspect.signature(thing).return_annotation,
    )
    own_name = name.partition(".")[2]
    if own_name.startswith("check"):
        return "check"
    positional = [p for p in inspect.signature(thing).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if own_name.startswith("keep_") and len(positional) == 2 and parameters[0] == "model":
        return "builder"
    if parameters == ["model", "tokens", "length"] and returns == "Tensor":
        return "observation"
    if returns in ("list[int]", "list[list[int]]"):
        return "budget" if "budget" in parameters else "selection"
    return "score" if returns == "Tensor" else "unknown"


def of_kind(which: str) -> dict[str, Any]:
    return {name: thing for name, thing in FOUND.items() if kind(name) == which}


PRUNERS, SELECTIONS, BUDGETS = of_kind("pruner"), of_kind("selection"), of_kind("budget")
BUILDERS, OBSERVATIONS = of_kind("builder"), of_kind("observation")


def test_everything_public_is_of_some_kind():
    assert of_kind("unknown") == {}
    assert set(of_kind("value")) == {"pruner.Checked", "pruner.Needs", "pruner.Pruner", "vocabulary.Trimmed"}
    with_parts = {name.partition(".")[0] for name in FOUND}
    assert {m.__name__.rpartition(".")[2] for m in modules(pruning)} == with_parts | HELPERS
    assert len(PRUNERS) >= 7
    assert len(BUILDERS) >= 4
    assert len(OBSERVATIONS) >= 3


# -- pruners of KV -----------------------------------------------------------------------------------------------------

every_pruner = pytest.mark.parametrize("cls", PRUNERS.values(), ids=PRUNERS.keys())


@pytest.mark.parametrize("test", SUITE.names)
@every_pruner
def test_every_pruner_keeps_the_rules(cls, test):
    check_pruner(build(cls, None), only=[test])


@every_pruner
def test_a_pruner_is_linked_to_its_paper_or_says_that_it_has_none(cls):
    about = inspect.getmodule(cls).__doc__
    assert "arXiv" in about or "control" in about


def rows_of(kept: Tensor) -> list[list[list[int]]]:
    """Row, head -> the slots, without the padding."""
    return [[[slot for slot in head if slot >= 0] for head in row] for row in kept.tolist()]


@every_pruner
def test_a_pruner_refuses_what_makes_no_sense_by_name(cls):
    pruner = build(cls, None)
    name = type(pruner).__name__
    for change, message in (
        ({"budget": 0}, "budget is 0: keep at least 1"),
        ({"budget": -2}, "budget is -2: keep at least 1"),
        ({"length": torch.tensor([9, 15, 5, 11])}, r"length\[1\] is 15 and a row has 14 slots"),
        ({"length": torch.tensor([9, -1, 5, 11])}, r"length\[1\] is -1"),
        ({"length": torch.tensor([9])}, r"length is \[1\]; it must be \[4\]"),
        ({"keys": torch.zeros(B, H, S)}, "keys are"),
        ({"values": torch.zeros(B, H, S + 1, 6)}, "keys are"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            pruner(**{"budget": 6, **arguments(), **change})
    for change, message in (
        ({"length": 16}, r"length is 16: give a tensor \[4\]"),
        ({"budget": 0.2}, r"budget is 0\.2: give a whole number"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: {message}"):
            pruner(**{"budget": 6, **arguments(), **change})
    for small in range(1, 5):  # what a pruner keeps in any case may not fit, and then it says so
        try:
            kept = pruner(budget=small, **arguments())
        except ValueError as error:
            assert f"{name}: budget is {small} and " in str(error)  # noqa: PT017
            assert ": raise the budget, or " in str(error)  # noqa: PT017
        else:
            assert [[len(slots) for slots in row] for row in rows_of(kept)] == [[small] * H] * B


# -- pruners that drive a draft ----------------------------------------------------------------------------------------

ROWS = [list(range(3, 43)), [5, 6, 7] * 7, [9, 8, 7, 6]]
OBSERVED = 4


@dataclass(frozen=True)
class Watched:
    """Another pruner, and what it was given and returned in every layer."""

    inner: Any
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def needs(self) -> pruning.Needs:
        return self.inner.needs

    def __call__(self, keys, values, length, budget, attention=None):
        kept = self.inner(keys, values, length, budget, attention=attention)
        self.calls.append({"length": length, "budget": budget, "attention": attention, "kept": kept})
        return kept


def drafting(pruner: Any, **changes: Any) -> sd.drafts.MagicDec:
    settings = {"window": 4, "budget": 12, "observation": OBSERVED, "refresh": 3, **changes}
    return sd.drafts.MagicDec(pruner=pruner, **settings)


@pytest.fixture(scope="module")
def target() -> sd.HFModel:
    return sd.HFModel(tiny("llama", num_hidden_layers=3))


@every_pruner
@pytest.mark.parametrize("temperature", [0.0, 0.7], ids=["greedy", "sampled"])
def test_every_pruner_drives_magicdec_without_changing_the_text(target, cls, temperature):
    """Coupled verification shows a sampled text to be that of plain decoding, token for token."""
    base = sd.decoder(target).sampling(temperature=temperature)
    base = base.verifier(sd.Coupled() if temperature else sd.Rejection())
    plain = base.build().generate(ROWS, [24, 31, 9], seed=[1, 2, 3])
    watched = Watched(build(cls, None))
    out = base.draft(drafting(watched), length=3).build().generate(ROWS, [24, 31, 9], seed=[1, 2, 3])
    assert out.ids == plain.ids
    assert out.stats.tau > 1
    assert len(watched.calls) > 3  # it chose again in later rounds
    for call in watched.calls:
        assert (call["attention"] is not None) == watched.needs.attention
        assert call["attention"] is None or call["attention"].shape[2] == OBSERVED
    layers = watched.calls[:3]
    if watched.needs.attention:
        assert not torch.equal(layers[0]["attention"], layers[1]["attention"])


@every_pruner
def test_every_pruner_drives_magicdec_to_the_targets_own_distribution(cls):
    """Certified: the probability of every text, over all that may be drawn, against transformers' forward."""
    model = tiny("llama", vocab_size=3)
    model.set_attn_implementation("sdpa")  # eager attention rounds its weights to float32

    def logits(prefixes: list[list[int]]) -> Tensor:
        with torch.inference_mode():
            return model(torch.tensor(prefixes)).logits[:, -1]

    watched = Watched(build(cls, None))
    draft = drafting(watched, window=1, budget=5, observation=1, refresh=1)
    decoder = sd.decoder(sd.HFModel(model)).draft(draft, length=1).build()
    found = certify(decoder, ((0, 1, 2, 0, 1, 2, 2, 1, 0), (2, 1)), (3, 2), logits=logits, batch=256)
    assert found.lossless
    assert len(watched.calls) > 4


@every_pruner
def test_every_pruner_keeps_a_budget_of_its_own_in_each_layer(target, cls):
    watched, budgets = Watched(build(cls, None)), [20, 9, 6]
    plain = sd.decoder(target).greedy().build().generate(ROWS, 12)
    draft = drafting(watched, budget=budgets)
    assert sd.decoder(target).greedy().draft(draft, 3).build().generate(ROWS, 12).ids == plain.ids
    for i, call in enumerate(watched.calls):
        assert call["budget"] == budgets[i % 3]
        for b, length in enumerate(call["length"].tolist()):
            kept = (call["kept"][b] >= 0).sum(-1)
            assert (kept == min(length, budgets[i % 3])).all()


DENSE = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3},
    "gpt_oss": {"sliding_window": 8},
}


@pytest.mark.parametrize("family", DENSE)
def test_the_weights_that_a_pruner_is_given_are_those_of_the_targets_attention(family):
    """Against transformers' own weights of a dense forward: grouped heads, windows, scales, capped scores, sink logits."""
    model = tiny(family, **DENSE[family])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0)
    model.set_attn_implementation("eager")
    watched = Watched(pruning.TOVA())
    sd.decoder(sd.HFModel(model)).draft(drafting(watched), 3).build().generate(ROWS[:2], 1, seed=0)
    assert len(watched.calls) == model.config.num_hidden_layers
    for b, ids in enumerate(ROWS[:2]):
        with torch.inference_mode():
            whole = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
        n = len(ids)
        for call, weights in zip(watched.calls, whole):
            got = call["attention"][b, ..., : n - 4]  # those between one sink and a window of four
            assert call["length"][b] == n - 4
            # Eager attention rounds its weights to float32.
            torch.testing.assert_close(
                got.double(), weights[0, :, n - OBSERVED :, 1 : n - 3].double(), rtol=1e-4, atol=1e-6
            )


# -- selections --------------------------------------------------------------------------------------------------------

every_selection = pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS.keys())


def from_what(select: Any, size: int) -> Any:
    """The first argument of a selection: how many there are, or a score for each."""
    first, nested = (
        next(iter(inspect.signature(select).parameters.values())),
        "list[list" in inspect.signature(select).return_annotation,
    )
    torch.manual_seed(1)
    return size if first.annotation == "int" else torch.rand(3, size) if nested else torch.rand(size)


@every_selection
def test_a_selection_is_ascending_and_as_large_as_asked(select):
    for keep in range(1, 9):
        given = from_what(select, 8)
        copies = copy.deepcopy(given)
        chosen = select(given, keep)
        assert given == copies if isinstance(given, int) else torch.equal(given, copies)
        for one in chosen if isinstance(chosen[0], list) else [chosen]:
            assert all(type(i) is int for i in one)
            assert one == sorted(set(one))
            assert len(one) == keep
            assert 0 <= one[0] <= one[-1] < 8
        if isinstance(given, Tensor):  # the best of a larger score
            scores = given.view(-1, 8)
            for one, score in zip(chosen if isinstance(chosen[0], list) else [chosen], scores):
                rest = [i for i in range(8) if i not in one]
                assert not rest or score[one].min() >= score[rest].max()


@every_selection
def test_a_selection_of_none_or_too_many_is_refused(select):
    for keep in (0, -1, 9):
        with pytest.raises(ValueError, match=f"keep is {keep}"):
            select(from_what(select, 8), keep)


@pytest.mark.parametrize("spread", BUDGETS.values(), ids=BUDGETS.keys())
@pytest.mark.parametrize("layers", [1, 2, 3, 8, 31])
@pytest.mark.parametrize("budget", [1, 2, 7, 64, 100])
def test_layer_budgets_add_up(spread, layers, budget):
    each = spread(layers, budget)
    assert len(each) == layers
    assert sum(each) == layers * budget
    assert min(each) >= 1
    assert each == sorted(each, reverse=True)
    for wrong in ((0, 4), (4, 0), (4, -1)):
        with pytest.raises(ValueError, match=r"layers is 0|budget is"):
            spread(*wrong)


# -- builders and observations -----------------------------------------------------------------------------------------

LAYERS, KV_HEADS, CHANNELS, VOCABULARY = 3, 2, 48, 97
WHOLE = {  # by the name of the selection's parameter: everything, and less
    "layers": ([0, 1, 2], [0, 2]),
    "heads": ([[0, 1]] * LAYERS, [[0], [1], [1]]),
    "channels": ([list(range(CHANNELS))] * LAYERS, [[0, 5, 9], [1, 2, 40], [7, 8, 47]]),
    "ids": (list(range(VOCABULARY)), [3, 5, 96]),
}
every_builder = pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS.keys())
every_observation = pytest.mark.parametrize("observe", OBSERVATIONS.values(), ids=OBSERVATIONS.keys())
every_llama = pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
TOKENS = torch.arange(48).view(2, 24) * 7 % VOCABULARY


def model_of(family: str, **changes: Any) -> Any:
    return tiny(family, num_hidden_layers=LAYERS, **changes)


def selections(builder: Any) -> tuple[Any, Any]:
    name = list(inspect.signature(builder).parameters)[1]
    assert name in WHOLE, f"add what {name} keeps in all, and in part, to WHOLE"
    return WHOLE[name]


def inside(built: Any) -> Any:
    """The model that a builder gives, or gives back in a value."""
    return getattr(built, "model", built) if not isinstance(built, torch.nn.Module) else built


def fingerprint(model: Any) -> str:
    digest = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted([*model.state_dict().items(), *model.named_buffers()]):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    digest.update(
        str([(name, m.training, len(m._forward_hooks)) for name, m in model.named_modules()]).encode()
    )
    return digest.hexdigest()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@every_llama
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@every_builder
def test_a_builder_only_reads_and_shares_nothing(builder, family, tied):
    model = model_of(family, tie_word_embeddings=tied)
    before, state = fingerprint(model), torch.get_rng_state()
    new = inside(builder(model, selections(builder)[1]))
    assert torch.equal(torch.get_rng_state(), state)
    mine = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    assert not mine & {t.untyped_storage().data_ptr() for t in [*new.parameters(), *new.buffers()]}
    assert new.config is not model.config
    assert new.generation_config is not model.generation_config
    assert sum(p.numel() for p in new.parameters()) < sum(p.numel() for p in model.parameters()) or tied
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1)
    new.config.vocab_size += 1
    assert fingerprint(model) == before


@every_llama
@every_builder
def test_keeping_everything_changes_nothing(builder, family):
    model = model_of(family)
    new = inside(builder(model, selections(builder)[0]))
    assert type(new) is type(model)
    assert torch.equal(logits(new), logits(model))
    assert [p.dtype for p in new.parameters()] == [p.dtype for p in model.parameters()]
    assert not new.training
    assert inside(builder(model.train(), selections(builder)[0])).training


@every_llama
@every_builder
def test_what_is_built_trains_saves_and_loads(builder, family, tmp_path):
    built = builder(model_of(family).float(), selections(builder)[1])
    new = inside(built)
    assert all(p.requires_grad for p in new.parameters())
    new(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
    assert all(p.grad is not None for p in new.parameters())
    if built is new:  # a trimmed unembedding is not something that a config can say
        new.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert torch.equal(logits(again), logits(new))
        assert again.config.to_dict().get("layer_types") == new.config.to_dict().get("layer_types")


@every_builder
def test_a_builder_takes_low_precision_as_it_is(builder):
    model = model_of("llama", dtype=torch.bfloat16)
    new = inside(builder(model, selections(builder)[1]))
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new.dtype == torch.bfloat16


@every_builder
def test_a_builder_refuses_what_it_cannot_copy(builder):
    part = selections(builder)[1]
    name = builder.__name__
    with pytest.raises(TypeError, match=f"{name}: model is a Linear.*merge_and_unload"):
        builder(torch.nn.Linear(2, 2), part)
    altered = model_of("llama")
    altered.model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{name}: LlamaForCausalLM does not follow from its config.*extra"):
        builder(altered, part)
    quantized = model_of("llama")
    quantized.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=f"{name}: the weights are quantized"):
        builder(quantized, part)
    offloaded = model_of("llama")
    offloaded.model.norm.to("meta")
    with pytest.raises(ValueError, match=f"{name}: some weights are offloaded"):
        builder(offloaded, part)


@every_llama
@every_observation
def test_an_observation_leaves_the_model_and_ignores_padding(observe, family):
    model = model_of(family).train()
    model.model.layers[0].eval()  # a mixture of modes is put back as it was
    before, state = fingerprint(model), torch.get_rng_state()
    length = torch.tensor([24, 9])
    seen = observe(model, TOKENS, length)
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(model) == before
    assert seen.shape[0] == LAYERS
    assert not seen.requires_grad
    assert seen.isfinite().all()
    junk = TOKENS.clone()
    junk[1, 9:] = 5
    assert torch.equal(observe(model, junk, length), seen)
    assert not torch.equal(observe(model, TOKENS), seen)
    apart = torch.stack([observe(model, TOKENS[:1]), observe(model, TOKENS[1:, :9])])
    mean = (apart * torch.tensor([24, 9]).view(2, *[1] * (apart.dim() - 1))).sum(0) / 33
    assert torch.allclose(mean, seen, atol=1e-12)  # every token counts once


@every_observation
def test_an_observation_that_fails_leaves_no_hooks(observe):
    model = model_of("llama")
    before = fingerprint(model)
    with pytest.raises(IndexError):
        observe(model, TOKENS + VOCABULARY)
    assert fingerprint(model) == before
    for tokens, length in ((TOKENS[0], None), (TOKENS, torch.tensor([3])), (TOKENS, torch.tensor([0, 0])), (TOKENS, torch.tensor([3, 25]))):  # fmt: skip
        with pytest.raises(ValueError, match=r"tokens are|length is"):
            observe(model, tokens, length)
