"""The parts that a family composes a decoder of: plain descriptions, without arrays and without JAX.

Each part says what its tensors are called in a checkpoint, relative to the decoder layer that it belongs to. `jaxllm/layers/` has a
module for each.
"""

from jaxllm.model_parts.attention import Attention, GatedDeltaNet, LatentAttention, OutputGate, QueryScale, TokenIndex
from jaxllm.model_parts.audio import Audio, AudioTokens, CrossAttentionLayer
from jaxllm.model_parts.decoder import Head, Layer, Names, Positions, StateMixer, TokenMixer
from jaxllm.model_parts.encoder import Classifier, ClassifierHidden, Encoder
from jaxllm.model_parts.gemma4 import Gemma4Layer, PerLayerEmbedding
from jaxllm.model_parts.kimi_delta import KimiDeltaAttention
from jaxllm.model_parts.lightning import LightningAttention
from jaxllm.model_parts.mamba2 import Mamba2
from jaxllm.model_parts.mlp import MLP, Activation, ExpertActivation, MoE, Routing, Scoring
from jaxllm.model_parts.next_token import NextToken
from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.rope import Rope, RopeKind
from jaxllm.model_parts.short_conv import ShortConv
from jaxllm.model_parts.vision import Merger, MergerLinear, Vision, VisionEncoder, VisionFamily, VisionLayer

__all__ = [
    "MLP",
    "Activation",
    "Attention",
    "Audio",
    "AudioTokens",
    "Classifier",
    "ClassifierHidden",
    "CrossAttentionLayer",
    "Encoder",
    "ExpertActivation",
    "GatedDeltaNet",
    "Gemma4Layer",
    "Head",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LightningAttention",
    "Mamba2",
    "Merger",
    "MergerLinear",
    "MoE",
    "Names",
    "NextToken",
    "Norm",
    "OutputGate",
    "PerLayerEmbedding",
    "Positions",
    "QueryScale",
    "Rope",
    "RopeKind",
    "Routing",
    "Scoring",
    "ShortConv",
    "StateMixer",
    "TokenIndex",
    "TokenMixer",
    "Vision",
    "VisionEncoder",
    "VisionFamily",
    "VisionLayer",
]
