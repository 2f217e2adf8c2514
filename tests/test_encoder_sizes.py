"""Budgets and caches of encoders."""

from jaxllm.encoder_sizes import MAX_STEP_CLIPS, EncoderSizes
from jaxllm.model_parts import MLP, Audio, AudioTokens, MergerLinear


def test_a_step_encodes_a_few_of_the_longest_clips_or_more_shorter_ones() -> None:
    tokens = AudioTokens(9, "<|audio|>", "projector.", (MergerLinear("projector.linear", 64),), num_averaged=2)
    audio = Audio(128, 1500, 1280, 32, 20, MLP(5120), tokens=tokens)
    sizes = EncoderSizes.of_audio(audio)
    assert audio.sizes == (376, 750, 1500)
    assert sizes.max_item_embeddings == 750 and sizes.num_patches(750) == 1500
    assert sizes.max_step_patches // sizes.num_patches(750) == MAX_STEP_CLIPS
    assert sizes.num_patches(1) == sizes.num_patches(188) == 376, "as its program encodes"
    assert sizes.num_pages * sizes.page_embeddings >= 2 * MAX_STEP_CLIPS * 750
