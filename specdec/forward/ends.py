"""The two ends of a model: its embedding before the first block, and its final norm and head after the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.configs import blocks_of, body_of, setting
from specdec.forward.taps import listening, tapped


@dataclass(frozen=True, eq=False)
class Ends:
    """A model's embedding, final norm and head, applied to any ids and vectors. The modules are the model's own, which is not
    changed: no gradient reaches its weights.

    Attributes:
        table: the embedding module. norm: the final norm. output: the linear head. scale: factor of the logits. softcap: logits become
            ``softcap * tanh(logits / softcap)``. blocks: how many blocks lie between the ends.
    """

    table: Any
    norm: Any
    output: Any
    scale: float
    softcap: float | None
    blocks: int

    @staticmethod
    def of(model: Any) -> Ends:
        """The ends of a transformers causal LM.

        Raises:
            ValueError: the final norm was not found, or the model does more to its logits than is known here.
        """
        config = model.config.get_text_config()
        body = setting(body_of(model), "decoder") or body_of(model)
        norm = setting(
            body, "norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f", "embedding_norm"
        )
        if norm is None:
            raise ValueError(
                f"target: no final norm found in a {type(model).__name__}: draft heads need one, use a llama-like model"
            )
        factor, divisor = (
            setting(config, "logit_scale", "lm_head_multiplier"),
            setting(config, "logits_scaling"),
        )
        scale = (1.0 if factor is None else float(factor)) / (1.0 if divisor is None else float(divisor))
        cap = setting(config, "final_logit_softcapping")
        return Ends(
            *(model.get_input_embeddings(), norm, model.get_output_embeddings()),
            *(scale, None if cap is None else float(cap), len(blocks_of(model))),
        )

    def __deepcopy__(self, memo: Any) -> Ends:
        """The same ends: they belong to a model, which copying a draft must not copy."""
        return self

    @torch.no_grad()
    def check(self, model: Any) -> None:
        """Compare with a forward of ``model``, or of a structural clone of it, on a few ids; it has hooks during this call.

        Raises:
            ValueError: its logits are not those of the head on the normed output of the last block.
        """
        where = self.table.weight.device
        ids = torch.arange(4, device=where)[None] % len(self.table.weight)
        caught = listening(model, [self.blocks])
        with tapped(model, caught, lambda hidden: hidden):
            said = model(input_ids=ids, use_cache=False).logits
        ours = self.logits(self.final(caught[self.blocks][0]))
        bound = 64 * torch.finfo(said.dtype).eps ** 0.75 * float(said.abs().max())
        if ours.shape != said.shape or not float((ours - said).abs().max()) <= bound:
            raise ValueError(
                f"target: a {type(model).__name__} does more to its logits than its final norm, its head, a scale and a soft cap: draft heads "
                "cannot be used with it"
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...]`` ids -> ``[..., E]``, rows of the embedding table without the factor that some families apply."""
        return F.embedding(tokens, self.table.weight.detach())

    def final(self, hidden: Tensor) -> Tensor:
        """``[..., E]`` after the last block -> ``[..., E]``, the input of the head."""
        with torch.no_grad():
            return self.norm(hidden)

    def logits(
        self, final: Tensor, product: Callable[[Tensor, Any], Tensor] | None = None, raw: bool = False
    ) -> Tensor:
        """``[..., E]`` -> ``[..., V]``; ``product``: what multiplies by ``output`` in place of PyTorch. raw: without the scale and the soft cap."""
        bias = self.output.bias
        # PyTorch multiplies a tensor with gaps batch by batch, with a copy of the matrix for each.
        final = final.contiguous()
        if product is None:
            out = F.linear(final, self.output.weight.detach(), None if bias is None else bias.detach())
        else:
            out = product(final, self.output)
        if raw:
            return out
        out = out if self.scale == 1 else out * self.scale
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap
