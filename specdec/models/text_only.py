"""The language model of a multimodal one: texts alone, on the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from specdec.configs import setting
from specdec.forward.families import multimodal, refuse
from specdec.models.clone import structural_clone

TWINS = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), "qwen2"),
    **{"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"},
}
"""Language models without a causal LM of their own. Their positions have three axes, which are equal for text, so they compute what these families do."""


def text_only(model: Any) -> PreTrainedModel:
    """The language model of a multimodal one as a ``...ForCausalLM`` on its parameters, for prompts without images or sounds.

    Gemma 3, Mistral Small 3, Qwen-VL, LLaVA and InternVL, for example. ``model`` is not changed, and later changes of its weights in place take effect. The
    forwards of both are compared on random ids first. ``specdec.decoder`` and ``HFModel.from_pretrained`` call it for multimodal models.

    Raises:
        TypeError: it is no multimodal model. UnsupportedModel: transformers has no causal LM of this language model, or the two forwards differ.
    """
    model = setting(model, "_orig_mod") or model  # torch.compile's wrapper
    if not isinstance(model, PreTrainedModel) or not multimodal(model.config):
        raise TypeError(
            f"model is a {type(model).__name__}: give a multimodal model of transformers, a ...ForConditionalGeneration"
        )
    family, text = model.config.model_type, model.config.get_text_config(decoder=True)
    if text is model.config:
        raise refuse(family, "it is multimodal, and its config has none of a language model", other=False)
    twin = TWINS.get(text.model_type)
    config = copy.deepcopy(text) if twin is None else _translated(text, twin)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise refuse(
            family,
            f"it is multimodal, and transformers has no causal LM for its language model ({text.model_type})",
            other=False,
        )
    whole = [part for part in model.modules() if type(part) is kind]
    made: Any = whole[0] if len(whole) == 1 else _assembled(model, kind, config)
    _check(model, made)
    return made


def _translated(text: Any, family: str) -> Any:
    """The config of a language model as one of ``family``, with the same settings; positions have one axis."""
    settings = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rope = {
        name: value for name, value in (text.rope_parameters or {}).items() if not name.startswith("mrope")
    }
    if text.model_type == "qwen3_vl_moe_text":
        settings["norm_topk_prob"] = True  # it has no such setting, and always does
    settings["rope_parameters"] = rope | (
        {"rope_type": "default"} if rope.get("rope_type") == "mrope" else {}
    )
    return AutoConfig.for_model(family, **settings)


def _assembled(model: Any, kind: Any, config: Any) -> Any:
    """A ``kind`` on the parameters of the body and the output matrix of ``model``."""
    own = structural_clone(model)  # modules of its own, and accelerate's hooks, on the same tensors
    body, head = own.get_decoder(), own.get_output_embeddings()
    config.tie_word_embeddings = head is not None and head.weight is body.get_input_embeddings().weight
    with init_empty_weights(include_buffers=False):
        made = kind(config)
    if type(made.base_model) is type(body) and head is not None:
        setattr(made, made.base_model_prefix, body)
        made.set_output_embeddings(head)
        made.config = body.config  # the one that all its modules read
        made.config.tie_word_embeddings, made.config.use_cache = config.tie_word_embeddings, config.use_cache
    else:
        _assign(model, made, body, head)
    made.generation_config, made.name_or_path = model.generation_config, model.name_or_path
    return made.eval()


def _assign(model: Any, made: Any, body: Any, head: Any) -> None:
    """Give ``made`` the tensors of a body of another class."""
    devices = {p.device for p in model.parameters()}
    place = next((name for name, part in made.named_modules() if part is made.get_output_embeddings()), "")
    inside = f"{made.base_model_prefix}."
    tensors = {inside + name: tensor for name, tensor in [*body.named_parameters(), *body.named_buffers()]}
    tensors |= {} if head is None else {f"{place}.{name}": p for name, p in head.named_parameters()}
    for name, p in made.named_parameters():  # torch gives the parameters that it assigns this flag
        p.requires_grad_(tensors[name].requires_grad if name in tensors else False)
    try:
        made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
    except (KeyError, RuntimeError) as error:
        raise refuse(
            model.config.model_type,
            f"it is multimodal, and its parts are not those of {type(made).__name__} ({error})",
            other=False,
        ) from error
    if len(devices) > 1:
        raise refuse(
            model.config.model_type,
            f"its language model becomes a {type(made).__name__}, and it is spread over {len(devices)} devices: load it on one",
            other=False,
        )
    made.to(devices.pop())  # the buffers


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
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    bound = 64 * torch.finfo(made.dtype).eps
    if not error <= bound:
        raise refuse(
            model.config.model_type,
            f"it is multimodal, and its logits differ from those of {type(made).__name__} on its weights by {error:.1e} (relative)",
            other=False,
        )


def _plain_id(special: set[Any]) -> int:
    return next(i for i in range(len(special) + 1) if i not in special)
