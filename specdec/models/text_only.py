"""The language model of a multimodal one: texts alone, on the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from specdec.configs import setting
from specdec.forward.families import refuse
from specdec.models.clone import structural_clone


def multimodal(config: Any) -> bool:
    """Whether a model's config is one of several kinds of input, with a config for its texts."""
    parts = setting(config, "vision_config", "audio_config", "vision_tower_config")
    return parts is not None and config.get_text_config(decoder=True) is not config


def text_only(model: Any) -> PreTrainedModel:
    """The language model of a multimodal one as a ``...ForCausalLM`` on its parameters, for prompts without images or sounds.

    Gemma 3, Mistral Small 3, LLaVA and InternVL, for example. ``model`` is not changed, and later changes of its weights in place take effect. The
    forwards of both are compared on random ids first. ``specdec.decoder`` and ``HFModel.from_pretrained`` call it for multimodal models.

    Raises:
        TypeError: it is no multimodal model. UnsupportedModel: transformers has no causal LM of this language model, or the two forwards differ.
    """
    if not isinstance(model, PreTrainedModel) or not multimodal(model.config):
        raise TypeError(
            f"model is a {type(model).__name__}: give a multimodal model of transformers, a ...ForConditionalGeneration"
        )
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    family = model.config.model_type
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise refuse(
            family,
            f"it is multimodal, and transformers has no causal LM for its language model ({config.model_type})",
            other=False,
        )
    whole = [part for part in model.modules() if type(part) is kind]
    made: Any = whole[0] if len(whole) == 1 else _assembled(model, kind, config)
    _check(model, made)
    return made


def _assembled(model: Any, kind: Any, config: Any) -> Any:
    """A ``kind`` that has the body and the output matrix of ``model``."""
    family, head = model.config.model_type, model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    config.tie_word_embeddings = head is not None and head.weight is embedding.weight  # for saving
    with torch.device("meta"):
        made = kind(config)
    name = made.base_model_prefix
    bodies = [part for part in model.modules() if type(part) is type(getattr(made, name))]
    if len(bodies) != 1 or head is None:
        raise refuse(family, f"it is multimodal, and its parts are not those of {kind.__name__}", other=False)
    own = structural_clone(model)  # modules of its own on the same tensors
    (body,) = [part for part in own.modules() if type(part) is type(bodies[0])]
    setattr(made, name, body)
    made.set_output_embeddings(own.get_output_embeddings())
    made.config = body.config  # the one that all its modules read
    made.config.tie_word_embeddings, made.config.use_cache = config.tie_word_embeddings, config.use_cache
    left = [name for name, part in [*made.named_parameters(), *made.named_buffers()] if part.is_meta]
    if left:
        raise refuse(family, f"it is multimodal, and its language model has no {left[0]}", other=False)
    made.eval()
    made.generation_config = copy.deepcopy(model.generation_config)
    return made


def _check(model: Any, made: Any, tokens: int = 24) -> None:
    """Raise UnsupportedModel where the two forwards differ on random ids."""
    both = [structural_clone(one) for one in (model, made)]
    special = {
        value for name, value in vars(model.config).items() if name.endswith(("_token_id", "_token_index"))
    }
    ids = torch.randint(0, made.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids[torch.isin(ids, torch.tensor([i for i in special if isinstance(i, int)], dtype=torch.long))] = (
        _plain_id(special)
    )
    at = made.get_input_embeddings().weight.device
    with torch.no_grad():
        try:
            theirs = both[0](input_ids=ids.to(at), use_cache=False).logits.float()
        except Exception as failed:  # what a model says without an image is its own
            raise refuse(
                model.config.model_type,
                f"it is multimodal, and its forward fails for text alone ({failed})",
                other=False,
            ) from failed
        ours = both[1](input_ids=ids.to(at), use_cache=False).logits.float()
    error = _relative(ours, theirs)
    bound = 64 * torch.finfo(made.dtype).eps
    if not error <= bound:
        raise refuse(
            model.config.model_type,
            f"it is multimodal, and its logits differ from those of {type(made).__name__} on its weights by {error:.1e} (relative)",
            other=False,
        )


def _plain_id(special: set[Any]) -> int:
    return next(i for i in range(len(special) + 1) if i not in special)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())
