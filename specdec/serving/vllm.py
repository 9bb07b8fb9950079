"""Drafts that read ids only, as a proposer of vLLM's ``custom_class`` (vllm#39487): vLLM decodes, and a draft of this library proposes.

``speculative_config={"method": "custom_class", "model": "specdec.serving.vllm.Proposer", "num_speculative_tokens": 4}``. Another draft is a subclass in a module
of one's own, ``class Mine(Proposer): draft = NGram(max_match=5)``. Written to the interface that vLLM documents, and not run in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from specdec import tree
from specdec.capabilities import DraftPart
from specdec.drafts.ngram import NGram
from specdec.protocols import Draft
from specdec.rng import Philox
from specdec.types import Context


class Proposer:
    """Proposes what ``draft`` proposes for each request's ids, afresh in every call, since vLLM does not say which request a row is.

    Args:
        vllm_config: vLLM's; ``speculative_config.num_speculative_tokens`` and ``model_config.max_model_len`` are read.
    Attributes:
        draft: of the class; it must choose its tokens without randomness, because vLLM verifies them as such.
    Raises:
        ValueError: the draft reads the target.
    """

    draft: ClassVar[Draft[Any]] = NGram()

    def __init__(self, vllm_config: Any):
        self.length = int(vllm_config.speculative_config.num_speculative_tokens)
        self.limit = int(vllm_config.model_config.max_model_len)
        self.part = DraftPart.of(type(self).draft)
        if self.part.reads_target:
            raise ValueError(
                f"draft {self.part.info.name!r} reads the target's activations or cache, which vLLM does not pass: give a draft of ids, such as "
                "NGram"
            )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Up to ``num_speculative_tokens`` ids for each request.

        Args:
            sampled_token_ids: new ids of each request; without any (a prompt that is not read yet) nothing is proposed.
            num_tokens_no_spec: ``[B]`` tokens of each request, the new ones included. token_ids_cpu: ``[B, L]`` their ids.
        Raises:
            ValueError: the draft proposed a tree, or tokens that it sampled.
        """
        out: list[list[int]] = [[] for _ in sampled_token_ids]
        lengths = [int(n) for n in num_tokens_no_spec]
        rows = [b for b, new in enumerate(sampled_token_ids) if len(new) and 0 < lengths[b] < self.limit]
        if not rows:
            return out
        context = Context.of([[int(i) for i in token_ids_cpu[b][: lengths[b]]] for b in rows])
        budget = torch.tensor([min(self.length, self.limit - lengths[b]) for b in rows])
        state = self.part.draft.init(context, None)
        proposal, _ = self.part.propose(state, context, budget, Philox(torch.zeros_like(budget)))
        if proposal.probs is not None or not bool(tree.is_chain(proposal.parents, proposal.size).all()):
            raise ValueError(
                f"draft {self.part.info.name!r} proposed sampled tokens or a tree, which vLLM would verify wrongly: give a draft of chains chosen "
                "without randomness, such as NGram"
            )
        for b, ids, size in zip(rows, proposal.tokens.tolist(), proposal.size.tolist()):
            out[b] = ids[:size]
        return out

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """There is no model to load."""
