"""Makes the drafter and its control that a `speculative_config` asks for."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.config import AUTO_MODEL_LEN, EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.hub import resolve_model
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.topology import Topology
from jaxllm.scheduler.draft_control import DraftControl
from jaxllm.speculative import dflash, draft_model, eagle, mtp_modules
from jaxllm.speculative.control import AdaptiveControl
from jaxllm.speculative.dflash import BlockDiffusion
from jaxllm.speculative.draft_model import DraftModel
from jaxllm.speculative.eagle import Eagle
from jaxllm.speculative.grammar import GrammarControl, GrammarDrafter
from jaxllm.speculative.mtp import MultiTokenPrediction
from jaxllm.speculative.mtp_modules import SeveralModules
from jaxllm.speculative.ngram import NGramDrafter
from jaxllm.speculative.options import SpeculativeConfig, of_engine
from jaxllm.text.model_files import text_files

AnyDrafter = GrammarDrafter | NGramDrafter | DraftModel | Eagle | MultiTokenPrediction | SeveralModules | BlockDiffusion


@dataclass(frozen=True)
class Drafters:
    """See `jaxllm.engine.features.Speculation`."""

    options: SpeculativeConfig
    drafter: AnyDrafter
    are_elsewhere: bool = False
    """Whether another host has drafts that this one, which makes the masks of grammars, would have to read."""

    @property
    def drafts_forced(self) -> bool:
        """See Speculation."""
        return self.options.method == "grammar"

    @property
    def described(self) -> Mapping[str, Any]:
        """See Speculation."""
        return {**dataclasses.asdict(self.options), **self.drafter.described}

    def new_control(self, policy: KernelPolicy) -> DraftControl:
        """See Speculation."""

        def most_drafts(num_running: int) -> int:
            return self.options.most_drafts(num_running) if policy.has_drafts(num_running) else 0

        if self.drafts_forced:
            return GrammarControl(self.options.num_speculative_tokens, most_drafts=most_drafts)
        return AdaptiveControl(
            self.options.num_speculative_tokens,
            self.drafter.num_lookahead,
            most_drafts=most_drafts,
            # Synthetic acceptance would leave a grammar: it accepts what the target does not draw.
            with_grammars=not (self.drafter.synthetic_rates or self.are_elsewhere),
        )


def make(config: EngineConfig, target: ModelConfig) -> Drafters:
    """For an engine with these options, of which speculative_config is set. Raises ConfigError or ModelLoadError."""
    options = of_engine(config)
    assert options is not None
    if not target.generates:
        raise ConfigError("speculative_config: this model writes no tokens; leave speculative_config out")
    if target.attends_to_audio:
        raise ConfigError(f"speculative_config: {target.architecture} has no drafts here; leave speculative_config out")
    try:
        are_elsewhere = config.parallel.num_ranks > 1 and config.parallel.nnodes > 1
        return Drafters(options, _drafter(options, config, target), are_elsewhere)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from error


def _drafter(options: SpeculativeConfig, config: EngineConfig, target: ModelConfig) -> AnyDrafter:
    num_drafts = options.num_speculative_tokens
    acceptance: dict[str, Any] = {
        "accepts_by_ratio": options.rejection_sample_method == "standard",
        "synthetic_rates": options.synthetic_rates_after_each,
    }
    if options.method == "grammar":
        return GrammarDrafter(num_drafts)
    if options.method == "ngram":
        return NGramDrafter(num_drafts, options.prompt_lookup_min, options.prompt_lookup_max, **acceptance)
    given, topology = config.model, Topology.of(config.parallel)
    size = topology.tensor
    target_directory = text_files(given.model, revision=given.revision, download_dir=given.download_dir)
    fields = {
        "num_drafts": num_drafts,
        "is_drawn": options.draft_sample_method == "probabilistic",
        "seed": given.seed or 0,
        **acceptance,
    }
    if options.method == "mtp":
        fields |= {"load_format": given.load_format, "tensor_parallel_size": size, "num_expert_devices": topology.expert}
        return mtp_modules.make(target_directory, target, **fields)
    assert options.model is not None
    directory = resolve_model(options.model, options.revision, given.download_dir)
    fields["load_format"] = "dummy" if given.load_format == "dummy" else "auto"
    if options.method == "draft_model":
        wanted = given.max_model_len
        return draft_model.make(
            directory,
            target,
            target_directory=target_directory,
            tensor_parallel_size=size,
            max_model_len=target.max_position if wanted in (None, AUTO_MODEL_LEN) else wanted,
            on_gpu=jax.default_backend() != "cpu",
            quantization=options.quantization,
            **fields,
        )
    if options.method == "dflash":
        return dflash.make(directory, target, tensor_parallel_size=size, **fields)
    return eagle.make(directory, target, is_third=options.method == "eagle3", tensor_parallel_size=size, **fields)
