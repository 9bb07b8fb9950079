"""A short name for a model's weights, so that a draft or data made for one target is not used with another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from specdec.configs import setting


def fingerprint(model: nn.Module, samples: int = 256) -> str:
    """16 hexadecimal digits from every parameter's name, shape and ``samples`` evenly spaced values.

    Values are rounded to bf16 first: a bf16 checkpoint has the same fingerprint in whatever precision it was loaded. Weights of a tensor
    class that cannot be flattened are dequantised first.

    Raises:
        TypeError: the values of a parameter cannot be read.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters()):
        digest.update(f"{name}{list(value.shape)}".encode())
        digest.update(
            _sampled(name, value, samples).to(torch.bfloat16).cpu().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:16]


@torch.no_grad()
def _sampled(name: str, value: Tensor, samples: int) -> Tensor:
    """Evenly spaced values ``[at most samples]`` of a parameter."""
    if type(value) in (Tensor, nn.Parameter):
        return _spaced(value.detach(), samples)
    try:
        return _spaced(value.detach(), samples)
    except Exception:  # a class of tensors that cannot be flattened or indexed
        try:
            return _spaced(value.detach().dequantize(), samples)
        except Exception as error:
            raise TypeError(
                f"the target's parameter {name!r} is a {type(value).__name__}, whose values cannot be read for a fingerprint of the weights ({error}): use the "
                "model as it is before it is quantised, and load its drafts for this one with any_target=True"
            ) from error


def _spaced(value: Tensor, samples: int) -> Tensor:
    flat = value.flatten()
    last = len(flat) - 1
    # The same values on every device and with every default dtype; float32 rounds the last number of a large weight up.
    at = torch.linspace(0, max(last, 0), min(samples, len(flat)), dtype=torch.float32, device="cpu")
    return flat[at.long().clamp(max=last).to(flat.device)]


def check_made_for(what: str, made_for: str, target: nn.Module, retrain: str, load: str) -> None:
    """Raise ValueError where a draft was made for another target than ``target``, as far as it is known.

    Args:
        what: the draft is, ``made_for``: which target, ``retrain``: how a new one is made, ``load``: how it is loaded for any target; for the message.
    """
    if made_for and (found := fingerprint(target)) != made_for:
        raise ValueError(
            f"this {what} was made for target {made_for}, and this target is {found} (fingerprints of the weights): use its own target, or make a {what} "
            f"from this one{retrain} and train it; if this is the same target in another form (quantised, with an adapter, merged), load the {what} with "
            f"{load}, which checks sizes only"
        )


def unwrapped(model: Any) -> Any:
    """The transformers model of an ``HFModel``, or of what ``torch.compile`` returns; anything else as it is."""
    own = model.model if hasattr(model, "score") and hasattr(model, "clone") else model
    return setting(own, "_orig_mod") or own
