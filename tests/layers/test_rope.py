import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.rope import axis_of_frequency, frequencies, rope_angles
from jaxllm.model_parts import Rope
from jaxllm.models.load_config import load_model_config
from pallas_kernels.rope_cache_write.xla import apply_rope
from tests.helpers import goldens


def test_dot_products_depend_on_the_distance_only():
    rope = Rope()
    query, key = (jax.random.normal(jax.random.key(i), (1, 2, 64)) for i in (0, 1))

    def score(query_position: int, key_position: int) -> np.ndarray:
        rotated = [
            apply_rope(x, rope_angles(rope, 64, jnp.array([p]))) for x, p in ((query, query_position), (key, key_position))
        ]
        return np.asarray(jnp.einsum("tkh,tkh->k", *rotated))

    np.testing.assert_allclose(score(17, 5), score(112, 100), rtol=1e-4, atol=1e-4)


def test_bfloat16_is_rotated_by_float32_angles():
    rope = Rope()
    x = jnp.ones((1, 1, 64), jnp.bfloat16)
    turned = apply_rope(x, rope_angles(rope, 64, jnp.array([4001])))
    assert turned.dtype == jnp.bfloat16
    angle = 4001.0  # of the fastest dimension, which turns one radian a position
    np.testing.assert_allclose(float(turned[0, 0, 0]), np.cos(angle) - np.sin(angle), atol=0.01)


def test_dynamic_is_plain_within_the_pretrainings_context():
    plain, dynamic = Rope(), (Rope(kind="dynamic", factor=2.0, original_max_position=32))
    positions = jnp.arange(32)
    for a, b in zip(rope_angles(plain, 64, positions), rope_angles(dynamic, 64, positions), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_dynamic_depends_on_a_tokens_own_position_only():
    rope = Rope(kind="dynamic", factor=2.0, original_max_position=32)
    together, alone = rope_angles(rope, 64, jnp.arange(100)), rope_angles(rope, 64, jnp.array([57]))
    np.testing.assert_array_equal(together[0][57], alone[0][0])


@pytest.mark.torch
@pytest.mark.parametrize("name", [n for n in goldens.NAMES if "rope" in n or n == "qwen3"])
def test_frequencies_and_scaling_equal_transformers(name):
    pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = AutoConfig.from_pretrained(goldens.FOLDER / name)
    kind = theirs.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, scaling = compute(theirs)
    attention = load_model_config(goldens.FOLDER / name).layers[0].attention
    rope, head_dim = attention.rope, attention.head_dim
    assert rope.attention_factor == pytest.approx(scaling, rel=1e-12)
    np.testing.assert_allclose(frequencies(rope, head_dim), expected.numpy(), rtol=2e-7)
    if kind == "dynamic":
        expected, _ = compute(theirs, seq_len=101)
        cos, sin = rope_angles(rope, head_dim, jnp.array([100]))
        np.testing.assert_allclose(cos[0], np.cos(100 * expected.numpy()), atol=2e-5)
        np.testing.assert_allclose(sin[0], np.sin(100 * expected.numpy()), atol=2e-5)


def test_which_frequencies_turn_by_time_row_and_column():
    interleaved = axis_of_frequency(Rope(sections=(24, 20, 20), sections_interleaved=True), 128)
    np.testing.assert_array_equal(interleaved, [0, 1, 2] * 20 + [0] * 4)
    by_section = axis_of_frequency(Rope(sections=(16, 24, 24)), 128)
    np.testing.assert_array_equal(by_section, [0] * 16 + [1] * 24 + [2] * 24)


@pytest.mark.parametrize("interleaved", [True, False])
def test_each_frequency_of_a_rope_with_sections_turns_by_its_axis(interleaved):
    rope, plain = Rope(sections=(4, 2, 2), sections_interleaved=interleaved), Rope()
    positions_3T = jnp.array([[5, 5, 9], [5, 6, 9], [5, 7, 9]])
    found = rope_angles(rope, 16, positions_3T)
    by_axis = [rope_angles(plain, 16, positions_T) for positions_T in positions_3T]
    for frequency, axis in enumerate(axis_of_frequency(rope, 16)):
        for values, expected in zip(found, by_axis[axis], strict=True):
            np.testing.assert_array_equal(values[:, frequency], expected[:, frequency])
    for values, expected in zip(rope_angles(rope, 16, positions_3T[0]), by_axis[0], strict=True):
        np.testing.assert_array_equal(values, expected)
