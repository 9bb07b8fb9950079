"""All exhibits: bugs of other projects with their repair, mistakes that only look like bugs, and transformers' code as installed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.audit.certify import Certificate, certify
from specdec.audit.museum import parts, real, rules
from specdec.audit.museum.exhibit import M2, T2, T3, T4, T6, Exhibit, Pair, given_first, of, one_round
from specdec.audit.planted import BlockByThePaper, DrawnElsewhere, PositionKeyed
from specdec.builder import decoder
from specdec.models import TableModel
from specdec.verifiers import Rejection


def everything() -> list[Exhibit]:
    """Bugs B1 to B13, false alarms, and transformers' code."""
    return [
        exhibit
        for hall in (numbers_reused, wrong_laws, wrong_rules, stops, orders, false_alarms, installed)
        for exhibit in hall()
    ]


def numbers_reused() -> Iterator[Exhibit]:
    """A random number decides again after its effect was seen."""
    noise = partial(of, target=T3.target, tokens=1)
    yield Exhibit(
        "B2: draft and residual share their Gumbel noise, T3",
        "vllm-project/vllm#54282 (fixed)",
        0.0346,
        lambda: noise(rules.shared_noise(fresh=False)),
        lambda: noise(rules.shared_noise(fresh=True)),
    )
    source = "vllm-project/vllm#47808"
    fresh = partial(_adaptive, lag=1)
    for tokens, expected in ((3, 0.030), (4, 0.0315), (5, 0.0365)):
        yield Exhibit(
            f"B3: adaptive verification, draft noise by position, {tokens} tokens after a 0, T2",
            source,
            expected,
            partial(_adaptive, tokens=tokens, lag=1, wrap=parts.DraftByPosition),
            partial(fresh, tokens=3),
        )
    yield Exhibit(
        "B3: the same by confidences two blocks old, 3 tokens",
        source,
        0,
        partial(_adaptive, lag=2, wrap=parts.DraftByPosition),
    )
    yield Exhibit(
        "B3: by live confidences, first descent, 3 tokens", source, 0, partial(_adaptive, lag=0, first=True)
    )
    yield Exhibit(
        "B3: by live confidences, best of all lengths, 3 tokens",
        "NVIDIA/TensorRT-LLM#17056 (whether its confidences are live was not found out)",
        0.075,
        partial(_adaptive, lag=0),
        partial(_adaptive, lag=0, first=True),
    )
    source = "vllm-project/vllm#46781 (as read; no issue)"
    for name, draft, k, wrap, expected in (
        ("greedy draft of 2, T2", TableModel([1.0, 0.0]), 2, parts.AcceptanceByPosition, 0.0865),
        ("greedy draft of 3, T2", TableModel([1.0, 0.0]), 3, parts.AcceptanceByPosition, 0.119),
        ("drawn draft of 2, 4 tokens, T2", T2.draft, 2, PositionKeyed, 0.036),
    ):
        tokens = k + 3 if wrap is PositionKeyed else k + 2
        yield Exhibit(
            f"B4: block verification, numbers by position, {name}",
            source,
            expected,
            partial(_block, draft, k, tokens, wrap),
            partial(_block, draft, k, tokens, lambda rng: rng),
        )
    yield Exhibit(
        "B8: the number that rejected picks the replacement, T3",
        "vllm-project/vllm-ascend#16370",
        0.0375,
        lambda: one_round(T3, rules.one_number, 1),
        lambda: one_round(T3, rules.token_rule, 1),
    )
    rounds = partial(of, target=T3.target, tokens=2)
    yield Exhibit(
        "B10: noise drawn once a prompt, first tokens of two rounds, T3",
        "Infini-AI-Lab/Sequoia (no issue)",
        0.285,
        lambda: rounds(rules.noise_of_the_prompt(fresh=False)),
        lambda: rounds(rules.noise_of_the_prompt(fresh=True)),
    )


def wrong_laws() -> Iterator[Exhibit]:
    """Tokens were not drawn from the distribution that the test takes."""
    source = "huggingface/transformers#47932, SinglePositionMultiTokenCandidateGenerator"
    for name, pair, k, expected in (
        ("1 token, T4", T4, 1, 0.45),
        ("2 tokens, T4", T4, 2, 0.54),
        ("1 token, T3", T3, 1, 0.15),
    ):
        yield Exhibit(
            f"B1: argmax declared as a draw, {name}",
            source,
            expected,
            partial(real.single_position, pair, k, declared=True),
            partial(real.single_position, pair, k, declared=False),
            real_code=True,
        )
    yield Exhibit(
        "B5: drawn in bfloat16, verified in float32, 6 logits",
        "deepseek-ai/DeepSpec#31",
        0.0003,
        partial(_rounded, torch.bfloat16),
        partial(_rounded, torch.float32),
    )
    for name, pair, least, expected in (
        ("0.25, T3", T3, 0.25, 0.110),
        ("0.5, (.7, .3) / (.6, .4)", Pair([0.7, 0.3], [0.6, 0.4]), 0.5, 0.180),
    ):
        p, q = pair.target.probs, pair.draft.probs
        yield Exhibit(
            f"B6: a drawn token below p_min is dropped, p_min {name}",
            "ggml-org/llama.cpp#22506 with #27694",
            expected,
            partial(of, rules.dropped_below(p, q, least, drops=True), pair.target, 1),
            partial(of, rules.dropped_below(p, q, least, drops=False), pair.target, 1),
        )
    p, q = T4.target.probs, T4.draft.probs
    yield Exhibit(
        "B11: the 2 most probable tokens declared as draws without replacement, T4",
        "NJUNLP/MCSD, MCSD/inference/strategies.py",
        0.225,
        lambda: of(rules.top_k(p, q, 2, declared=True), T4.target, 1),
        lambda: of(rules.top_k(p, q, 2, declared=False), T4.target, 1),
    )


def wrong_rules() -> Iterator[Exhibit]:
    """The rule of acceptance is another than the one that was proved."""

    def row(
        name: str,
        source: str,
        expected: float | None,
        pair: Pair,
        k: int,
        rule: Any,
        right: Any = rules.block_rule,
    ) -> Exhibit:
        return Exhibit(
            name, source, expected, partial(one_round, pair, rule, k), partial(one_round, pair, right, k)
        )

    ascend, hsd = "vllm-project/vllm-ascend", "ZhouYuxuanYX/Hierarchical-Speculative-Decoding (no issue)"
    yield row(
        "B7: products of ratios against products of uniforms, 3 tokens, T2",
        f"{ascend}#7807",
        0.237,
        T2,
        3,
        rules.products,
    )
    fixed = Pair(T2.target.probs, [1.0, 0.0])
    yield row("B7: the same of a fixed draft, 3 tokens, T2", f"{ascend}#7603", None, fixed, 3, rules.products)
    for k, expected in ((2, 0.110), (3, 0.125)):
        yield row(
            f"B7: its repair, distributions before the token, {k} tokens, M2",
            f"{ascend}#7808",
            expected,
            M2,
            k,
            rules.laws_before,
        )
    yield row(
        "B8: acceptance numbers are 0, T3",
        f"{ascend}#13730",
        0.4,
        T3,
        1,
        rules.stands_at_zero,
        rules.token_rule,
    )
    for name, pair, k, expected in (
        ("2 tokens, T2", T2, 2, 0.060),
        ("3 tokens, T2", T2, 3, 0.0766),
        ("2 tokens, T6", T6, 2, 0.040),
        ("3 tokens, T6", T6, 3, 0.0616),
    ):
        yield row(f"B9: the last test is not capped, {name}", hsd, expected, pair, k, rules.uncapped)


def stops() -> Iterator[Exhibit]:
    """Text goes on after it should have ended."""
    for stop in (0, 1, 2):
        yield Exhibit(
            f"B12: a stopping criterion inside a block, 2 drafted, 3 tokens, ends at token {stop}",
            "huggingface/transformers#48039, generate(assistant_model=...)",
            # A matter of the two random models. A draft ends at a token that it gives less than 0.4, as 0 and 2 are here: exact where
            # the criteria are asked about the end of the draft.
            0 if real.ASKS_ABOUT_DRAFTS and stop != 1 else None,
            partial(real.generate, 2, 3, stop=stop),
            partial(real.generate, 2, 3, stop=stop, crop=True),
            real_code=True,
        )


def orders() -> Iterator[Exhibit]:
    """The logits of a pruned head are read in another order than it has."""
    yield Exhibit(
        "B13: a draft with another tokenizer, logits in another order, 2 tokens, in its own float32",
        "huggingface/transformers, generate(assistant_tokenizer=...)",
        None,
        partial(real.two_tokenizers, 2, "bcax"),
        partial(real.two_tokenizers, 2, "abcx"),
        real_code=True,
    )


def false_alarms() -> Iterator[Exhibit]:
    """What was reported as a bias and is exact; and a repair that was asked for and would be biased."""
    yield Exhibit(
        "false alarm: a fresh draw of the target decides, 2 tokens, T3",
        "lablup/mlxcel#902, ml-explore/mlx-swift-lm#459, dflash#74",
        0,
        lambda: one_round(T3, rules.equality, 2),
    )
    p, q = T4.target.probs, T4.draft.probs
    yield Exhibit(
        "false alarm: most probable tokens as point masses, T4",
        "SafeAILab/EAGLE#329, #183, #221",
        0,
        lambda: of(rules.top_k(p, q, 2, declared=False), T4.target, 1),
    )
    yield Exhibit(
        "false alarm: right block verification of a fixed draft, 2 tokens, T2",
        "vllm-project/vllm-ascend#7603",
        0,
        lambda: one_round(Pair(T2.target.probs, [1.0, 0.0]), rules.block_rule, 2),
    )
    yield Exhibit(
        "false alarm: block verification goes on after a failed test, 2 tokens, T3",
        "vllm-project/vllm-ascend#11985",
        0,
        lambda: one_round(T3, rules.block_rule, 2),
    )
    for k, expected in ((2, 0.100), (3, 0.140)):
        yield Exhibit(
            f"what #11985 asks for: end at the first failed test, {k} tokens, T3",
            "vllm-project/vllm-ascend#11985",
            expected,
            partial(one_round, T3, rules.first_failure, k),
            partial(one_round, T3, rules.block_rule, k),
        )


def installed() -> Iterator[Exhibit]:
    """transformers as it is installed."""
    source = "huggingface/transformers, _speculative_sampling"
    for name, pair, k in (("2 tokens, T3", T3, 2), ("3 tokens, M2", M2, 3)):
        yield Exhibit(
            f"transformers' rule, {name}", source, 0, partial(one_round, pair, real.rule, k), real_code=True
        )

    def mixture(tokens: Tensor, q: Tensor, p: Tensor) -> Tensor:
        return real.rule(tokens, q, p, 0.5)

    yield Exhibit(
        "transformers' rule with assistant_ensemble_weight 0.5, which is lossy, 1 token, T3",
        source,
        0.2,
        lambda: one_round(T3, mixture, 1),
        lambda: one_round(T3, real.rule, 1),
        real_code=True,
    )
    source = "huggingface/transformers, generate(assistant_model=...)"
    threshold: dict[str, Any] = {"assistant_confidence_threshold": 0.6}
    yield Exhibit(
        "transformers' generate, 2 drafted, 3 tokens", source, 0, partial(real.generate, 2, 3), real_code=True
    )
    yield Exhibit(
        "transformers' generate, 2 drafted, 3 tokens, in its own float32",
        source,
        0,
        partial(real.generate, 2, 3, keep_float64=False),
        real_code=True,
    )
    yield Exhibit(
        "transformers' generate, 2 drafted, 3 tokens, confidence threshold 0.6",
        source,
        0,
        partial(real.generate, 2, 3, **threshold),
        real_code=True,
    )
    yield Exhibit(
        "transformers' generate, 2 drafted, 3 tokens, end of sequence",
        source,
        0,
        partial(real.generate, 2, 3, eos=1),
        real_code=True,
    )


# -- compositions -----------------------------------------------------------------------------------------------------------------


def _adaptive(tokens: int = 3, lag: int = 1, first: bool = False, wrap: Any = lambda rng: rng) -> Certificate:
    draft = parts.Confident(T2.draft.probs, lag, first)
    built = decoder(T2.target).draft(draft, length=3).build()
    return given_first(certify(built, max_new_tokens=tokens + 1, wrap=wrap), 0)


def _block(draft: TableModel, k: int, tokens: int, wrap: Any) -> Certificate:
    built = decoder(T2.target).draft(draft, length=k).verifier(BlockByThePaper()).build()
    return certify(built, max_new_tokens=tokens, wrap=wrap)


def _rounded(dtype: torch.dtype) -> Certificate:
    """A token drawn from a softmax in ``dtype`` and verified with the float32 softmax of the same logits."""
    logits = torch.tensor([1.54, -0.29, -2.18, 0.57, -1.08, -1.40])
    target = torch.tensor([0.40, 0.84, -0.72, -0.40, -0.60, 0.18]).double().softmax(0)
    drawn, said = (x / x.sum() for x in (logits.to(dtype).softmax(0).double(), logits.softmax(0).double()))
    draft = DrawnElsewhere(drawn, said)
    built = (
        decoder(TableModel(target)).draft(draft, length=1).verifier(Rejection(trust_declared=True)).build()
    )
    return certify(built, max_new_tokens=3)
