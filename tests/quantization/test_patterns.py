"""Names of modules in a quantization_config."""

import itertools

import pytest

from jaxllm.quantization.formats import read_formats
from jaxllm.quantization.formats.patterns import matches, matches_any, partly_covered
from jaxllm.weight_format import Options

OPTIONS = Options(None, None, on_gpu=False, dtype="float32", unquantized=())


def test_any_of_several_patterns():
    names = [".".join(parts) for n in (1, 2, 3) for parts in itertools.product(("mlp", "gate", "gate_proj", "1"), repeat=n)]
    for patterns in [*zip(names, reversed(names), strict=True), ("re:.*gate$", "1.mlp"), ("re:mlp", ""), ()]:
        for module in names:
            assert matches_any(patterns, module) == any(matches(pattern, module) for pattern in patterns), (patterns, module)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "modules_to_not_convert"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ignore"),
    ],
)
def test_hundreds_of_names_in_a_model_of_many_experts(given, key):
    parts = ("mlp.gate", "input_layernorm", "post_attention_layernorm", "self_attn.q_proj")
    names = [f"model.layers.{i}.{part}" for i in range(400) for part in parts]
    experts = [f"model.layers.{i}.mlp.experts.{j}" for i in range(24) for j in range(128)]
    linears = [linear for name in experts for linear in ((f"{name}.gate_proj", f"{name}.up_proj"), (f"{name}.down_proj",))]
    (format,) = read_formats({**given, key: names}, OPTIONS, [])
    assert partly_covered(format.covers, linears) == []
    assert not format.covers("model.layers.3.self_attn.q_proj") and format.covers("model.layers.3.self_attn.k_proj")
