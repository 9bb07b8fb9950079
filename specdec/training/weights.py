"""The weights of a draft in training: float32 copies that optimisers update, beside those that the forward uses, in the training's precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from specdec.configs import setting
from specdec.drafts.heads.model import HeadModel
from specdec.forward.ends import Ends
from specdec.training.muon import muon


class Weights:
    """Trains the parameters of ``draft`` that require a gradient, in ``precision`` on ``device``; the others keep their values.

    Args:
        settings: ``train.Settings``. ends: of the target, which a head uses meanwhile, in the same precision. products: what Muon multiplies in.
    Raises:
        ValueError: a language model without blocks named ``layers.``, or nothing to train.
    """

    def __init__(self, draft: Any, settings: Any, device: torch.device, ends: Ends, products: torch.dtype):
        trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("draft: no weight requires a gradient, so there is nothing to train")
        wide = matrices(draft) & trained.keys()
        self.draft, self.settings, self.step = draft, settings, 0
        self.dtypes = {name: p.dtype for name, p in trained.items()}
        self.home = next(draft.parameters()).device
        self.parts = draft._parameters, draft._modules
        twin = _with_copies(draft, settings.precision)
        draft._parameters, draft._modules = twin._parameters, twin._modules
        draft.to(device)  # copies of the weights that are kept: they may be the target's
        trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self.master = {name: p.detach().float().clone().requires_grad_() for name, p in trained.items()}
        self.ends = draft.ends if isinstance(draft, HeadModel) else None
        if isinstance(draft, HeadModel):
            draft.ends = ends
        draft.train()
        # Parameters only: draft.to(...) would round the rotary embedding's frequencies too.
        for p in trained.values():
            p.data = p.data.to(settings.precision, copy=True)  # it may be the target's storage
        self.pairs = [(p, self.master[name]) for name, p in trained.items()]
        self.matrices = [p for name, p in self.master.items() if name in wide]
        rest = [p for name, p in self.master.items() if name not in wide]
        self.optimisers: dict[str, torch.optim.Optimizer] = {}
        if self.matrices:
            self.optimisers["muon"] = muon(products, self.matrices, settings.muon_lr, settings.weight_decay)
        if rest:
            self.optimisers["adam"] = torch.optim.AdamW(
                rest, lr=settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0
            )
        self.rates = {"muon": settings.muon_lr, "adam": settings.adam_lr}

    def share(self, accelerator: Any) -> None:
        """All processes begin with the first one's weights."""
        if accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            with torch.no_grad():
                for low, high in self.pairs:
                    high.copy_(broadcast(high.detach()))
                    low.copy_(high)

    def update(self, rate: float, accelerator: Any) -> None:
        """A step of the optimisers, at ``rate`` times their learning rates."""
        for low, high in self.pairs:
            high.grad = torch.zeros_like(high) if low.grad is None else low.grad.float()
            low.grad = None
            if accelerator.num_processes > 1:
                high.grad = accelerator.reduce(high.grad, "mean")
        torch.nn.utils.clip_grad_norm_(self.master.values(), self.settings.clip)
        for name, optimiser in self.optimisers.items():
            optimiser.param_groups[0]["lr"] = self.rates[name] * rate
            optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_([low for low, _ in self.pairs], [high for _, high in self.pairs])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        states = {name: optimiser.state_dict() for name, optimiser in self.optimisers.items()}
        return {"master": self.master, **states, "step": self.step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` gave."""
        with torch.no_grad():
            for name, value in state["master"].items():
                self.master[name].copy_(value)
            torch._foreach_copy_([low for low, _ in self.pairs], [high for _, high in self.pairs])
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state[name])
        self.step = state["step"]

    def finish(self) -> None:
        """Copy the float32 weights into the draft, in its original precision and on its device, and give back what it had."""
        self.draft._parameters, self.draft._modules = self.parts
        self.draft.eval()
        with torch.no_grad():
            for name, p in self.draft.named_parameters():
                if name in self.master:
                    p.data = self.master[name].detach().to(self.home, self.dtypes[name])
                    p.grad = None
        self.draft.to(self.home)  # its buffers
        if isinstance(self.draft, HeadModel):
            self.draft.ends = self.ends


def matrices(draft: Any) -> set[str]:
    """The names of the matrices that Muon updates: of the blocks, and of a head all linear maps but those onto the vocabulary or one number.

    Raises:
        ValueError: a language model without blocks named ``layers.``.
    """
    if isinstance(draft, HeadModel):
        ends = {1, draft.outputs, draft.vocab_size}
        linear = {name: m for name, m in draft.named_modules() if isinstance(m, nn.Linear)}
        return {f"{name}.weight" for name, m in linear.items() if m.out_features not in ends}
    found = {name for name, p in draft.named_parameters() if p.ndim == 2 and "layers." in name}
    if not found:
        raise ValueError(
            f"draft: no blocks named 'layers.' in a {type(draft).__name__}: use a llama-like causal LM, or a head"
        )
    return found


def lowered(ends: Ends, device: torch.device, dtype: torch.dtype) -> Ends:
    """A target's embedding and head in ``dtype``, without gradients; the target keeps its own."""
    made: dict[int, Any] = {}

    def low(module: Any) -> Any:
        for one in (module.weight, setting(module, "bias")):
            if one is not None and id(one) not in made:
                made[id(one)] = one.detach().to(device, dtype)
        return SimpleNamespace(weight=made[id(module.weight)], bias=made.get(id(setting(module, "bias"))))

    return replace(ends, table=low(ends.table), output=low(ends.output))


def _with_copies(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A twin of ``module`` with the same parameters, but those without gradients, which may be the target's, in ``dtype``."""
    twin = copy.copy(module)
    twin._parameters = {
        name: p if p is None or p.requires_grad else nn.Parameter(p.detach().to(dtype), requires_grad=False)
        for name, p in module._parameters.items()
    }
    twin._modules = {
        name: child
        if child is None or all(p.requires_grad for p in child.parameters())
        else _with_copies(child, dtype)
        for name, child in module._modules.items()
    }
    return twin
