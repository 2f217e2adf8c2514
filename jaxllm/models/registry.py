"""Finds the family of a checkpoint. To add one: a file here and a line below, or a package with an entry point.

A family's file has a function `read`, from a `ConfigReader` to a `ModelConfig`. It imports no JAX, because clients read config.json
too.
"""

import difflib
import functools
import importlib
import importlib.metadata
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import ConfigError, ModelLoadError, shortened
from jaxllm.model_config import ModelConfig
from jaxllm.models import text_part
from jaxllm.models.config_reader import ConfigReader

Read = Callable[[ConfigReader], ModelConfig]

FAMILIES = {
    "AfmoeForCausalLM": ("afmoe", "jaxllm.models.afmoe:read"),
    "ApertusForCausalLM": ("apertus", "jaxllm.models.apertus:read"),
    "ArceeForCausalLM": ("arcee", "jaxllm.models.arcee:read"),
    "BailingHybridForCausalLM": ("bailing_hybrid", "jaxllm.models.bailing:read_v3"),
    "BailingMoeV2ForCausalLM": ("bailing_moe", "jaxllm.models.bailing:read"),
    "BailingMoeV2_5ForCausalLM": ("bailing_moe_v2_5", "jaxllm.models.bailing:read_v2_5"),
    "BailingMoeV3ForCausalLM": ("bailing_hybrid", "jaxllm.models.bailing:read_v3"),
    "BertForSequenceClassification": ("bert", "jaxllm.models.bert:read"),
    "BertModel": ("bert", "jaxllm.models.bert:read"),
    "Cohere2ForCausalLM": ("cohere2", "jaxllm.models.cohere:read_cohere2"),
    "CohereForCausalLM": ("cohere", "jaxllm.models.cohere:read"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "jaxllm.models.deepseek:read_v2"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "jaxllm.models.deepseek:read_v32"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "jaxllm.models.deepseek:read_v3"),
    "Dots1ForCausalLM": ("dots1", "jaxllm.models.dots1:read"),
    "Ernie4_5ForCausalLM": ("ernie4_5", "jaxllm.models.ernie:read"),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", "jaxllm.models.ernie_moe:read"),
    "Exaone4ForCausalLM": ("exaone4", "jaxllm.models.exaone4:read"),
    "GPT2LMHeadModel": ("gpt2", "jaxllm.models.gpt2:read"),
    "Gemma2ForCausalLM": ("gemma2", "jaxllm.models.gemma:read_gemma2"),
    "Gemma3ForCausalLM": ("gemma3_text", "jaxllm.models.gemma:read_gemma3"),
    "Gemma3ForConditionalGeneration": ("gemma3", "jaxllm.models.gemma3:read"),
    "Gemma4ForCausalLM": ("gemma4_text", "jaxllm.models.gemma4:read"),
    "Gemma4ForConditionalGeneration": ("gemma4", "jaxllm.models.gemma4:read"),
    "Gemma4UnifiedForCausalLM": ("gemma4_unified_text", "jaxllm.models.gemma4:read_unified"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "jaxllm.models.gemma4:read_unified"),
    "GemmaForCausalLM": ("gemma", "jaxllm.models.gemma:read"),
    "Glm4ForCausalLM": ("glm4", "jaxllm.models.glm:read_glm4"),
    "Glm4MoeForCausalLM": ("glm4_moe", "jaxllm.models.glm4_moe:read"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", "jaxllm.models.glm4_moe:read_lite"),
    "GlmForCausalLM": ("glm", "jaxllm.models.glm:read"),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", "jaxllm.models.glm4_moe:read_dsa"),
    "GptOssForCausalLM": ("gpt_oss", "jaxllm.models.gpt_oss:read"),
    "GraniteForCausalLM": ("granite", "jaxllm.models.granite:read"),
    "GraniteMoeForCausalLM": ("granitemoe", "jaxllm.models.granite_moe:read"),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", "jaxllm.models.granite_hybrid:read"),
    "GraniteMoeSWAForCausalLM": ("granitemoe_swa", "jaxllm.models.granite_swa:read_moe"),
    "GraniteSWAForCausalLM": ("granite_swa", "jaxllm.models.granite_swa:read"),
    "HYV3ForCausalLM": ("hy_v3", "jaxllm.models.hy3:read"),
    "HeliumForCausalLM": ("helium", "jaxllm.models.helium:read"),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", "jaxllm.models.hunyuan:read"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", "jaxllm.models.hunyuan:read_moe"),
    "HyperCLOVAXForCausalLM": ("hyperclovax", "jaxllm.models.hyperclovax:read"),
    "Idefics3ForConditionalGeneration": ("idefics3", "jaxllm.models.idefics3:read"),
    "InternVLForConditionalGeneration": ("internvl", "jaxllm.models.internvl:read"),
    "Jais2ForCausalLM": ("jais2", "jaxllm.models.jais2:read"),
    "KimiLinearForCausalLM": ("kimi_linear", "jaxllm.models.kimi_linear:read"),
    "LagunaForCausalLM": ("laguna", "jaxllm.models.laguna:read"),
    "Lfm2ForCausalLM": ("lfm2", "jaxllm.models.lfm2:read"),
    "Lfm2MoeForCausalLM": ("lfm2_moe", "jaxllm.models.lfm2:read_moe"),
    "Llama4ForCausalLM": ("llama4_text", "jaxllm.models.llama4:read"),
    "Llama4ForConditionalGeneration": ("llama4", "jaxllm.models.llama4:read"),
    "LlamaForCausalLM": ("llama", "jaxllm.models.llama:read"),
    "MellumForCausalLM": ("mellum", "jaxllm.models.mellum:read"),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", "jaxllm.models.mimo:read"),
    "MiMoV2ForCausalLM": ("mimo_v2", "jaxllm.models.mimo:read"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "jaxllm.models.minimax:read"),
    "Ministral3ForCausalLM": ("ministral3", "jaxllm.models.mistral:read_ministral3"),
    "MinistralForCausalLM": ("ministral", "jaxllm.models.ministral:read"),
    "Mistral3ForConditionalGeneration": ("mistral3", "jaxllm.models.mistral3:read"),
    "Mistral4ForCausalLM": ("mistral4", "jaxllm.models.mistral:read_mistral4"),
    "MistralForCausalLM": ("mistral", "jaxllm.models.mistral:read"),
    "MistralLarge3ForCausalLM": ("mistral_large_3", "jaxllm.models.mistral:read_large_3"),
    "MixtralForCausalLM": ("mixtral", "jaxllm.models.mixtral:read"),
    "ModernBertForSequenceClassification": ("modernbert", "jaxllm.models.modernbert:read"),
    "ModernBertModel": ("modernbert", "jaxllm.models.modernbert:read"),
    "MuseGlimmerForConditionalGeneration": ("muse_glimmer", "jaxllm.models.muse_glimmer:read"),
    "NemotronHForCausalLM": ("nemotron_h", "jaxllm.models.nemotron_h:read"),
    "NemotronH_Nano_Omni_Reasoning_V3": ("nemotron_h_omni", "jaxllm.models.nemotron_h:read_omni"),
    "OPTForCausalLM": ("opt", "jaxllm.models.opt:read"),
    "Olmo2ForCausalLM": ("olmo2", "jaxllm.models.olmo:read"),
    "Olmo3ForCausalLM": ("olmo3", "jaxllm.models.olmo:read_olmo3"),
    "OlmoeForCausalLM": ("olmoe", "jaxllm.models.olmoe:read"),
    "Phi3ForCausalLM": ("phi3", "jaxllm.models.phi3:read"),
    "PhiMoEForCausalLM": ("phimoe", "jaxllm.models.phimoe:read"),
    "PhimoeForCausalLM": ("phimoe", "jaxllm.models.phimoe:read"),
    "Plamo3ForCausalLM": ("plamo3", "jaxllm.models.plamo3:read"),
    "Qwen2AudioForConditionalGeneration": ("qwen2_audio", "jaxllm.models.qwen2_audio:read"),
    "Qwen2ForCausalLM": ("qwen2", "jaxllm.models.qwen2:read"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "jaxllm.models.qwen_moe:read_qwen2_moe"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "jaxllm.models.qwen2_5_vl:read"),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "jaxllm.models.qwen3_5:read"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "jaxllm.models.qwen3_5:read"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "jaxllm.models.qwen3_5:read_moe"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "jaxllm.models.qwen3_5:read_moe"),
    "Qwen3ForCausalLM": ("qwen3", "jaxllm.models.qwen3:read"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "jaxllm.models.qwen_moe:read_qwen3_moe"),
    "Qwen3NextForCausalLM": ("qwen3_next", "jaxllm.models.qwen3_next:read"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "jaxllm.models.qwen3_vl:read"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "jaxllm.models.qwen3_vl:read_moe"),
    "RobertaForSequenceClassification": ("roberta", "jaxllm.models.bert:read_roberta"),
    "RobertaModel": ("roberta", "jaxllm.models.bert:read_roberta"),
    "SarvamMoEForCausalLM": ("sarvam_moe", "jaxllm.models.bailing:read_sarvam"),
    "SeedOssForCausalLM": ("seed_oss", "jaxllm.models.seed_oss:read"),
    "SmolLM3ForCausalLM": ("smollm3", "jaxllm.models.smollm3:read"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "jaxllm.models.idefics3:read"),
    "SolarOpenForCausalLM": ("solar_open", "jaxllm.models.solar_open:read"),
    "StableLmForCausalLM": ("stablelm", "jaxllm.models.stablelm:read"),
    "Step3p5ForCausalLM": ("step3p5", "jaxllm.models.step3p5:read"),
    "Step3p7ForConditionalGeneration": ("step3p7", "jaxllm.models.step3p5:read"),
    "WhisperForConditionalGeneration": ("whisper", "jaxllm.models.whisper:read"),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", "jaxllm.models.bert:read_roberta"),
    "XLMRobertaModel": ("xlm-roberta", "jaxllm.models.bert:read_roberta"),
    "YoutuForCausalLM": ("youtu", "jaxllm.models.youtu:read"),
}
"""By architecture: the model_type, which stands in for an absent architecture, and the function that reads a config.json."""

CLASSIFIER = "ForSequenceClassification"
"""How the architectures of classifiers end."""
TEXT_MODEL_TYPES = {"kimi_k2": "DeepseekV3ForCausalLM"}
"""Further model_types of a `text_config`, by the architecture whose names and values these are."""
NOT_CAUSAL = ("PaliGemmaForConditionalGeneration",)
"""Architectures with a text model of a known family in which the tokens of a prompt all see each other."""

_LONGEST_NAME = 100
"""Characters of an unknown name that are compared with those of the known."""
ENTRY_POINTS = "jaxllm.models"
"""Group of the entry points by which installed packages add families: `architecture = "module:function"`."""


def architectures() -> list[str]:
    """Every architecture that can be loaded, those of installed packages included."""
    return sorted({*FAMILIES, *(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))})


def find(raw: Mapping[str, Any], source: object, model_class: str | None = None) -> tuple[str, Read, bool]:
    """The architecture of a config.json, the function that reads it, and whether the model has a head.

    `Qwen3Model` is `Qwen3ForCausalLM` without one, as is `Qwen3ForSequenceClassification`, which has another head; `Qwen3VLModel` is
    `Qwen3VLForConditionalGeneration`, and `BertForMaskedLM` is `BertModel`. Of an unknown architecture whose `text_config` is of a known
    one, the text model is read. model_class: module:name of the function, or of what has it as `read`.
    Raises ModelLoadError, which names `source`, for an unknown architecture; ConfigError for a model_class that cannot be used.
    """
    name = _name(raw)
    if (found := _found(raw, name, model_class)) is not None:
        return found
    told = f"the unknown architecture {shortened(name)}" if name else "no architecture"
    model_type = str(raw.get("model_type", ""))
    raise ModelLoadError(f"{source} has {told}; {_known(name[:_LONGEST_NAME], model_type[:_LONGEST_NAME])}")


def is_known(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family that can be loaded, or its text model is."""
    return _found(raw, _name(raw)) is not None


def _name(raw: Mapping[str, Any]) -> str:
    """The architecture that a config.json names; empty: it names none."""
    by_model_type = {model_type: name for name, (model_type, _) in FAMILIES.items()}
    model_type = str(raw.get("model_type", ""))
    names = raw.get("architectures") or [by_model_type.get(model_type, model_type)]
    return names[0] if isinstance(names, list) and isinstance(names[0], str) else ""


def _found(raw: Mapping[str, Any], name: str, model_class: str | None = None) -> tuple[str, Read, bool] | None:
    """What `find` returns; None: nothing reads this architecture."""
    kind = next((kind for kind in ("Model", CLASSIFIER) if name.endswith(kind)), None)
    whole = name if kind is None else f"{name.removesuffix(kind)}ForCausalLM"
    if model_class is not None:
        return whole, _imported(model_class), name == whole
    seeing = f"{name.removesuffix('Model')}ForConditionalGeneration" if name.endswith("Model") else name
    bare = re.sub("ForMaskedLM$", "Model", name)
    for architecture in dict.fromkeys((name, whole, seeing, bare)):
        if (read := _read_function(architecture)) is not None:
            return architecture, read, architecture == name
    is_causal = name.endswith(("ForConditionalGeneration", "ForCausalLM", "Model")) and name not in NOT_CAUSAL
    if is_causal and (read := _of_text_part(raw)) is not None:
        return name, read, not name.endswith("Model")
    return None


def _of_text_part(raw: Mapping[str, Any]) -> Read | None:
    """The function that reads the text model of a config.json of several models; None: it has none, or an unknown one."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return None
    by_model_type = {
        model_type: name for name, (model_type, _) in FAMILIES.items() if not name.endswith("ForConditionalGeneration")
    }
    named, model_type = text.get("architectures") or [None], text.get("model_type")
    of_type = (by_model_type | TEXT_MODEL_TYPES).get(model_type) if isinstance(model_type, str) else None
    for architecture in (named[0] if isinstance(named, list) else None, of_type):
        if isinstance(architecture, str) and (read := _read_function(architecture)) is not None:
            return functools.partial(text_part.read, read_text=read)
    return None


def _known(name: str, model_type: str) -> str:
    """Suggestions for an unknown family: the families with a name like an unknown one's, and the way to add one."""
    likeness = {
        known: max(_likeness(_stem(name), _stem(known)), _likeness(model_type, FAMILIES.get(known, ("",))[0]))
        for known in architectures()
    }
    near = sorted((known for known in likeness if likeness[known] >= 0.7), key=lambda known: -likeness[known])[:4]
    # No "did you mean": Mixtral is a letter away from Mistral, and another model.
    similar = f"known and similar: {', '.join(near)}; " if near else ""
    return f"{similar}`jaxllm models` lists the {len(likeness)} known, docs/HOW_TO_ADD.md says how to add one"


def _stem(architecture: str) -> str:
    return re.sub(f"(ForCausalLM|LMHeadModel|ForConditionalGeneration|{CLASSIFIER}|Model)$", "", architecture).lower()


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio() if name and other else 0.0


def _read_function(architecture: str) -> Read | None:
    if architecture in FAMILIES:
        module, _, name = FAMILIES[architecture][1].partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=architecture):
        package = point.dist.name if point.dist is not None else "a package"
        return _imported(point.value, f"the entry point {architecture} of {package}")
    return None


def _imported(path: str, what: str = "model_class") -> Read:
    """The function at module:name; `read` of a class or module there."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        found = operator.attrgetter(name)(found) if name else found
    except Exception as error:  # whatever the module raises
        raise ConfigError(
            f"{what} is {path!r}, which cannot be imported: {type(error).__name__}: {error}; give module:name, and install the "
            "package or run where Python finds it"
        ) from error
    read = getattr(found, "read", found if not isinstance(found, type) else None)
    if not callable(read):
        raise ConfigError(f"{what} is {path!r}, which has no function read, from a ConfigReader to a ModelConfig")
    return read  # type: ignore[no-any-return]
