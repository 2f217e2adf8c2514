"""Images: a vision encoder computes embeddings of their patches, which replace those of placeholder tokens in prompts."""

import math

import jax.numpy as jnp

from jaxllm.config import EngineConfig
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.parameters import parameters
from jaxllm.loaders.encoder import vision_weights
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Attention, Vision
from jaxllm.runner.features.images.packing import hidden_shape
from jaxllm.runner.features.images.step import Images
from jaxllm.runner.step_feature import FeatureParts, StepFeature
from jaxllm.runner.weights import WithWeights
from pallas_kernels.span_attention.xla import score_bytes


def weights(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> WithWeights | None:
    """The encoder, whole on every device."""
    return vision_weights(config.model, model_config)


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Bytes on each device of the encoder, of the slab, of what a step takes from it, of what is kept between parts of an image, and of
    temporary arrays of the largest encoding and of attention within images."""
    encoder, vision = vision_weights(config.model, model_config), model_config.vision
    if encoder is None or vision is None:
        return 0
    of_weights = sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for _, each in parameters(encoder.model))
    sizes, itemsize = _sizes(config, vision), jnp.dtype(model_config.dtype).itemsize
    kept = sizes.num_pages * sizes.page_embeddings + 2 * config.scheduler.max_step_tokens  # as gathered, and in parts
    num_bytes = of_weights + (kept * vision.result_width + math.prod(hidden_shape(vision, sizes))) * itemsize
    if vision.attends_within:
        num_bytes += span_bytes(config, model_config, sizes.max_item_embeddings - 1)
    if not config.multimodal.skip_mm_profiling:
        num_bytes += encoding_bytes(vision, sizes.programs[-1], model_config.dtype)
    return num_bytes


def encoding_bytes(vision: Vision, num_patches: int, dtype: str) -> int:
    """Temporary bytes while so many patches are encoded, an estimate: a layer's arrays, pixels and their products in float32, results, and
    the scores of a chunk of queries, where attention is plain JAX."""
    itemsize, width = jnp.dtype(dtype).itemsize, vision.hidden_size
    of_layer = (7 * width + 2 * vision.intermediate_size) * itemsize
    of_pixels = 4 * (vision.max_patch_values + 2 * width)
    of_results = (1 + vision.num_deepstack) * width * itemsize + 2 * vision.result_width * itemsize // vision.merge_size**2
    scores = 4 * 4 * vision.num_heads * min(1024, num_patches) * min(2048, num_patches)
    # XLA keeps more at a time than a layer needs: by half, on a CPU with the sizes of Qwen3-VL-8B.
    return int(1.5 * num_patches * (of_layer + of_pixels + of_results)) + scores


def span_bytes(config: EngineConfig, model_config: ModelConfig, most: int) -> int:
    """Temporary bytes of attention within images, an estimate: scores of later keys, and the results of both parts, with copies.

    most: later tokens that a token sees."""
    num_tokens, itemsize = config.scheduler.max_step_tokens, jnp.dtype(model_config.dtype).itemsize

    def of_layer(part: Attention) -> int:
        num_heads = part.num_kv_heads * part.group_size // config.parallel.tensor_parallel_size
        return 3 * score_bytes(num_tokens, num_heads, most) + 4 * num_tokens * num_heads * part.head_dim * itemsize

    return max(map(of_layer, model_config.attentions))


def make(parts: FeatureParts) -> StepFeature | None:
    """For models that see images."""
    config, vision = parts.model_config, parts.model_config.vision
    if vision is None:
        return None
    sizes = _sizes(parts.config, vision)
    return Images(vision, sizes, config.dtype, parts.kernels, parts.weights["images"].merge, config.has_rope_sections)


def _sizes(config: EngineConfig, vision: Vision) -> EncoderSizes:
    return EncoderSizes.of(vision, config.multimodal.mm_max_patches, config.multimodal.mm_max_decode_step_patches)
