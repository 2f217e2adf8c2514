"""Values of vLLM's speculative_config that are refused, with the reason."""

from collections.abc import Mapping
from typing import Any

METHODS_ELSEWHERE: Mapping[str, str] = {
    "suffix": "n-grams look up the request's own tokens",
    "medusa": "EAGLE-3 heads of the same models accept more",
    "mlp_speculator": "EAGLE-3 heads of the same models accept more",
    "dspark": "there are no heads of DFlash that look at the draft before",
    "extract_hidden_states": "hidden states leave the device only as embeddings",
    "custom_class": "drafters are part of the source (docs/HOW_TO_ADD.md)",
}
"""Methods of vLLM by name."""

REJECTION_METHODS_ELSEWHERE: Mapping[str, str] = {
    "block": "keeps the distribution of the output, as standard does",
    "fly": "changes the distribution of the output",
}
"""Values of rejection_sample_method of vLLM by name."""

_INHERITED = "drafts use what the model uses"
_NO_SUFFIX = "there is no suffix decoding; the method ngram looks up the request's own tokens"
_NO_BLOCKS = "there are no refined heads of DFlash; the methods dflash and eagle3 are the nearest"
_NO_FLY = "rejection_sample_method fly changes the distribution of the output; take exact or standard"
_BLOCK_HASHES = "prefix caching keeps drafts' caches right without options"

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "code_revision": ("a checkpoint's own code is never run",),
    "tensor_parallel_size": ("drafts are split like the model, by the engine's tensor_parallel_size",),
    "suffix_decoding_max_tree_depth": (_NO_SUFFIX,),
    "suffix_decoding_max_cached_requests": (_NO_SUFFIX,),
    "suffix_decoding_max_spec_factor": (_NO_SUFFIX,),
    "suffix_decoding_min_token_prob": (_NO_SUFFIX,),
    "use_heterogeneous_vocab": ("a draft model must have the model's vocabulary", False),
    "parallel_drafting": ("of heads that propose several drafts at once there are those of the method dflash", False),
    "enable_adaptive_verification": ("how many drafts a row gets follows from what was accepted before", False),
    "disable_eagle_block_drop": (_BLOCK_HASHES, False),
    "disable_lookahead_block_hashes": (_BLOCK_HASHES, False),
    "draft_lm_head_quantization": ("heads are never quantised",),
    "draft_load_config": ("the draft is loaded as the model is; model and revision name it",),
    "index_share_for_mtp_iteration": ("no model here has sparse attention by an index", False),
    "dspark_draft_topk": (_NO_BLOCKS,),
    "xpress_topc": (_NO_BLOCKS,),
    "fly_window_size": (_NO_FLY,),
    "fly_entropy_threshold": (_NO_FLY,),
    "fly_entropy_top_k": (_NO_FLY,),
    "kv_cache_dtype": (_INHERITED, "auto"),
    "enforce_eager": ("every step is a compiled program", False, True),
    "use_local_argmax_reduction": ("drafts are drawn over several devices as the model's own tokens are", False),
    "disable_padded_drafter_batch": ("batches always have compiled sizes", False),
    "disable_logprobs": ("logprobs are those of the model, with or without drafts", False),
    "disable_log_stats": ("set it as an option of the engine", False),
    "disable_mqa_scorer": ("all drafts of a row are verified at once", False),
}
"""Names of vLLM's object: why they are not supported, and values that ask for nothing."""

NO_EFFECT: Mapping[str, str] = {
    "attention_backend": "drafts use the kernels that the model uses",
    "moe_backend": "drafts use the kernels that the model uses",
    "max_model_len": "drafts are proposed up to the model's own max_model_len",
}
"""Names of vLLM's object that may have any value, and why it changes nothing here."""
