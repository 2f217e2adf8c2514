"""The registry of weight formats, and what options say of them. Imports none of them, because commands read options without numbers.

To add one: a file with a subclass of `jaxllm.weight_format.WeightFormat`, and an entry of FORMATS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A weight format as options name it."""

    path: str
    """module:name of the class."""
    online: Mapping[str, str] = field(default_factory=dict)
    """Values of --quantization by which plain weights get this format while they are loaded, with their help texts."""
    stored: tuple[str, ...] = ()
    """vLLM's names of checkpoints in this format."""
    widened: str = ""
    """The weights in it that --dequantize widens, for help and errors; empty: it does not change them."""


_PACKED = "packed weights in 4 or 8 bits"

FORMATS = (
    Registered(
        path="jaxllm.quantization.formats.rounded:Rounded",
        online={
            "int8": "the weights of the decoder's layers, and of experts that have a tensor each, become 8-bit integers while they are "
            "loaded, each output channel with a scale; activations stay as they are",
            "int4": "likewise 4-bit integers, in groups of up to 128 inputs with a scale: rounded to the nearest, which costs accuracy; "
            "checkpoints that were calibrated answer better",
        },
    ),
    Registered(path="jaxllm.quantization.formats.rounded_head:RoundedHead"),
    Registered(
        path="jaxllm.quantization.formats.compressed_tensors:CompressedTensors",
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.modelopt:ModelOpt",
        stored=("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.fp8_blocks:Fp8Blocks",
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.fp8:Fp8",
        online={
            "fp8": "the weights of the decoder's layers become 8-bit floats (e4m3, a scale per output channel) while they are loaded, "
            "activations likewise in each step (a scale per token), but not in steps of up to 16 tokens on GPUs whose kernels for "
            "this were verified"
        },
        stored=("compressed-tensors",),
    ),
    Registered(
        path="jaxllm.quantization.formats.gptq:Gptq",
        stored=("gptq", "gptq_marlin", "auto_gptq"),
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.awq:Awq",
        stored=("awq", "awq_marlin", "auto_awq"),
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.bitsandbytes:BitsAndBytes",
        stored=("bitsandbytes",),
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.gguf:Gguf",
        widened=_PACKED,
    ),
    Registered(
        path="jaxllm.quantization.formats.mxfp4:Mxfp4",
        stored=("mxfp4", "gpt_oss_mxfp4"),
        widened=_PACKED,
    ),
)
"""The first that claims a quantization_config reads it; a weight is in the first that declares it."""

ONLINE: Mapping[str, str] = {name: text for each in FORMATS for name, text in each.online.items()}
"""Values of --quantization, with their help texts."""
STORED = tuple(name for each in FORMATS for name in each.stored)
"""vLLM's names of checkpoints that can be read."""
WIDENED = " or ".join(dict.fromkeys(each.widened for each in FORMATS if each.widened))
"""The weights that --dequantize widens."""

if TYPE_CHECKING:
    Quantization = str
else:
    Quantization = Literal[tuple(ONLINE)]
    """A value of --quantization."""

HeadQuantization = Literal["int8"]
"""A value of --quantize-lm-head."""

QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside config.json that say how weights are quantised where it does not, and the quant_method of those that name none: of
ModelOpt, of AutoGPTQ and of AutoAWQ."""
