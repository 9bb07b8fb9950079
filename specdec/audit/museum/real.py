"""transformers' own code, as it is installed, on models of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.generation.utils import _speculative_sampling

from specdec.arguments import name_of
from specdec.audit.certify import Certificate
from specdec.audit.external import certify_function
from specdec.audit.llamas import llama
from specdec.audit.museum.exhibit import Pair, of
from specdec.audit.plain import enumerate_plain
from specdec.models import HFModel
from specdec.sampling import Sampling


class KeepFloat64(TorchFunctionMode):
    """Casts of float64 tensors and of integers to float32 are casts to float64, so that rounding does not hide a small bias."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = name_of(func, "")
        if (
            name in ("to", "float")
            and out.dtype == torch.float32
            and args[0].dtype in (torch.float64, torch.long)
        ):
            return args[0].to(torch.float64, copy=True)
        return out


ASKS_ABOUT_DRAFTS = "is_done_candidate" in signature(_speculative_sampling).parameters
"""Whether ``generate`` asks its stopping criteria about the end of the draft, too: transformers 5.17 does, 5.23 does not."""


def rule(tokens: Tensor, q: Tensor, p: Tensor, weight: float | None = None) -> Tensor:
    """``_speculative_sampling`` of the installed transformers, on probabilities ``q [k, V]`` and ``p [k + 1, V]``."""
    return verified(tokens[None], q.log()[None], p.log()[None], weight)


def verified(ids: Tensor, q: Tensor, p: Tensor, weight: float | None = None) -> Tensor:
    """``_speculative_sampling`` of the installed transformers: texts ``ids [1, >= k]``, logits ``q [1, k, V]`` and ``p [1, k + 1, V]`` -> tokens."""
    goes_on = {"is_done_candidate": False} if ASKS_ABOUT_DRAFTS else {}
    return _speculative_sampling(ids, q, q.shape[1], p, assistant_ensemble_weight=weight, **goes_on)[0][0]


class _Gemma4AssistantOfTables(torch.nn.Module):
    """An assistant model whose logits are a table's, for the class that drafts with a Gemma 4 assistant."""

    def __init__(self, q: Tensor, k: int):
        super().__init__()
        self.logits, self.device = q.log().expand(1, 1, -1), torch.device("cpu")
        self.generation_config = GenerationConfig(num_assistant_tokens=k)
        self.config = SimpleNamespace(is_encoder_decoder=False)

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.logits, last_hidden_state=torch.zeros(1, 1, 1))


def single_position(pair: Pair, k: int, declared: bool) -> Certificate:
    """k tokens of ``SinglePositionMultiTokenCandidateGenerator`` and then one more, by ``_speculative_sampling``.

    Args:
        declared: with the logits that the generator returns; if not, with those of point masses, which its tokens are.
    """
    V = len(pair.draft.probs)

    def run(prompt: list[int], budget: int) -> list[int]:
        config = GenerationConfig(max_length=len(prompt) + budget)
        drafts = SinglePositionMultiTokenCandidateGenerator(
            assistant_model=_Gemma4AssistantOfTables(pair.draft.probs, k),  # type: ignore[arg-type]
            target_model_input_embeddings=lambda ids: torch.zeros(*ids.shape, 1),  # type: ignore[arg-type]
            generation_config=config,
            input_ids=torch.tensor([prompt]),  # older versions need this and the next
            model_kwargs={},
        )
        outputs: Any = SimpleNamespace(hidden_states=[torch.zeros(1, 1, 1)], shared_kv_states={})
        ids, logits = drafts.get_candidates(torch.tensor([prompt]), {}, outputs, False, 0)  # type: ignore[arg-type]
        assert logits is not None
        if not declared:
            logits = torch.nn.functional.one_hot(ids[:, len(prompt) :], V).double().log()
        p = pair.target.probs.log().expand(1, k + 1, -1)
        new = verified(ids, logits, p).tolist()
        while len(new) < budget:
            new.append(int(torch.multinomial(pair.target.probs, 1)))
        return new

    return of(run, pair.target, k + 1)


# -- generate ---------------------------------------------------------------------------------------------------------------------


class EndsAt(StoppingCriteria):
    """A criterion of a user's own: a text ends after ``token``."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] == self.token


def generate(
    k: int,
    tokens: int,
    eos: int | None = None,
    stop: int | None = None,
    crop: bool = False,
    keep_float64: bool = True,
    **settings: Any,
) -> Certificate:
    """``generate(assistant_model=...)`` of two random llamas, k drafted tokens a round.

    Args:
        eos: an end of sequence. stop: a token that ends a text by a ``StoppingCriteria``. crop: what comes after that token is left out.
        keep_float64: casts to float32 are left out. settings: of the assistant's generation config.
    """
    with torch.random.fork_rng(devices=[]):
        target, draft, prompt = llama(0), llama(1), [0, 1]
    for name, value in {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        **settings,
    }.items():
        setattr(draft.generation_config, name, value)
    ends: Any = {} if stop is None else {"stopping_criteria": StoppingCriteriaList([EndsAt(stop)])}
    if eos is not None:
        ends["eos_token_id"] = eos
    mode: Callable[[], Any] = KeepFloat64 if keep_float64 else torch.no_grad

    def run(prompt: list[int], budget: int) -> list[int]:
        ids = torch.tensor([prompt])
        with mode():
            out = target.generate(  # type: ignore[misc]
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=draft,
                do_sample=True,
                max_new_tokens=budget,
                pad_token_id=0,
                top_k=0,
                **ends,
            )
        new = out[0, len(prompt) :].tolist()
        return new[: new.index(stop) + 1] if crop and stop in new else new

    def logits(prefixes: list[list[int]]) -> Tensor:
        with mode(), torch.no_grad():
            return target(torch.tensor(prefixes)).logits[:, -1]

    stops = tuple(token for token in (eos, stop) if token is not None)
    return certify_function(
        run, enumerate_plain(HFModel(target), Sampling(), prompt, tokens, stops, logits=logits)
    )


# -- two tokenizers ---------------------------------------------------------------------------------------------------------------


class _InOrder(PreTrainedTokenizerFast):
    """A tokenizer of single letters whose vocabulary is listed in an ``order``; others list theirs in any order, another in every process."""

    order: tuple[str, ...] = ()

    def get_vocab(self) -> dict[str, int]:
        known = super().get_vocab()
        return {name: known[name] for name in self.order}


def _letters(names: str, order: str) -> _InOrder:
    backend = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    made = _InOrder(tokenizer_object=backend)
    made.order = tuple(order)
    return made


def two_tokenizers(tokens: int, order: str) -> Certificate:
    """``generate(assistant_model=..., tokenizer=..., assistant_tokenizer=...)`` of two random llamas, one drafted token a round, in float32.

    The target knows the letters abc, and the assistant abcx. ``order``: in which the assistant's vocabulary lists its letters.
    """
    with torch.random.fork_rng(devices=[]):
        target, prompt = llama(0), [0, 1]
        config = deepcopy(target.config)
        config.vocab_size = 4
        torch.manual_seed(1)
        draft: Any = LlamaForCausalLM(config).float().eval()
        draft.generation_config = deepcopy(target.generation_config)
        draft.generation_config.num_assistant_tokens = 1
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        both = {"tokenizer": _letters("abc", "abc"), "assistant_tokenizer": _letters("abcx", order)}

        def run(prompt: list[int], budget: int) -> list[int]:
            ids = torch.tensor([prompt])
            out: Any = target.generate(  # type: ignore[misc]
                ids, attention_mask=torch.ones_like(ids), assistant_model=draft, do_sample=True, max_new_tokens=budget, pad_token_id=0,
                top_k=0, **both,
            )  # fmt: skip
            return list(out[0, len(prompt) :].tolist())

        run(
            prompt, 1
        )  # transformers exchanges the assistant's embedding and head in the first call, with random numbers

    def logits(prefixes: list[list[int]]) -> Tensor:
        with torch.no_grad():
            return target(torch.tensor(prefixes)).logits[:, -1]

    return certify_function(
        run, enumerate_plain(HFModel(target), Sampling(), prompt, tokens, (), logits=logits)
    )
