"""A narrow model for the tests of the demo that sees, and its logits."""

import jax
import jax.numpy as jnp
import numpy as np

from scripts.demo_data.packing import TOKEN_MASK
from scripts.demo_data.vision.model import Weights, encode_pictures, logits, text_hidden
from scripts.demo_data.vision.model_files import Sizes
from scripts.demo_data.vision.rows import Batch, BatchShape, Document, Packer

NARROW = Sizes(
    width=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_width=32,
    mlp_width=96,
    rope_sections=(6, 5, 5),
    tower_width=32,
    tower_layers=3,
    tower_heads=2,
    tower_mlp_width=48,
    grid=8,
    deepstack=(0, 1),
)


def all_logits(weights: Weights, document: Document) -> np.ndarray:
    """Float32 [T, V], as the training packs and computes the document."""
    shape = BatchShape(1, 256, 1, 400)
    batch = shape.empty()
    Packer(shape, batch).put(document, 0, [0] * len(document.pictures))

    return np.asarray(_compute(weights, batch))[0, : len(document.tokens)]


@jax.jit
def _compute(weights: Weights, batch: Batch) -> jax.Array:
    pictures = encode_pictures(weights, NARROW, batch.patches_VPC, batch.places_VP4, batch.segment_VP)
    ids, segment = (batch.tokens_RT & TOKEN_MASK).astype(jnp.int32), jnp.zeros((1, 256), jnp.int32)
    return logits(weights, text_hidden(weights, NARROW, ids, batch.positions_R3T, segment, batch.source_RT, pictures))
