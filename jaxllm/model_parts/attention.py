"""The attention parts of layers."""

from dataclasses import dataclass, replace
from typing import Literal

from jaxllm.model_parts.norm import Norm
from jaxllm.model_parts.rope import Rope
from jaxllm.model_parts.state_mixer import StateMixer


@dataclass(frozen=True)
class QueryScale:
    """A factor of queries that grows with their positions: 1 + rate * log(1 + floor((position + offset) / step)). Source:
    arXiv:2501.19399."""

    rate: float
    step: int
    """In tokens."""
    offset: int = 1


@dataclass(frozen=True)
class OutputGate:
    """Factors of the outputs of heads: products of what attention takes, after an activation."""

    name: str
    activation: Literal["sigmoid", "softplus"]
    by_head: bool
    """Whether all values of a head have the same factor."""


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention over keys and values in the cache, or in an encoder over those of the prompt."""

    num_heads: int
    num_kv_heads: int
    """Counts copies: see kv_head_replicas."""
    head_dim: int
    rope: Rope | None
    """None: without positions."""
    window: int | None = None
    """Keys that a token sees, itself included, in an encoder on each side; None: all before it, in an encoder all."""
    chunk: int | None = None
    """Tokens of a chunk of the sequence, of which a token sees only the same chunk; None: there are no chunks."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    key_bias: bool = True
    """Whether keys have them too."""
    out_bias: bool = False
    head_norms: tuple[Norm, Norm] | None = None
    """The norms of each query head and each key head, before the rotation; of equal epsilon."""
    rotates_first: bool = False
    """Whether these norms follow the rotation."""
    whole_norms: tuple[Norm, Norm] | None = None
    """Norms of queries and keys over all heads together."""
    own_norms: tuple[Norm, Norm] | None = None
    """Norms of queries and keys of each head, each with its own weight: [heads, head_dim]."""
    value_norm: Norm | None = None
    """The norm of each value head, without a weight."""
    values_are_keys: bool = False
    """Whether values are the keys before norm and rotation, instead of products of their own; `qkv` then has two names."""
    reads_layer: int | None = None
    """The earlier layer whose keys and values it reads, as it has none; `qkv` then has the name of the queries alone."""
    score_scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head_dim)."""
    query_scale: QueryScale | None = None
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    gated: bool = False
    """Whether the weight of the queries gives each head a gate too, behind its query: the head's output is multiplied by the gate's
    sigmoid."""
    gate: OutputGate | None = None
    """A gate with its own weight."""
    value_dim: int | None = None
    """Values of a head's value, if these are fewer than `head_dim`: the cache holds zeros behind them."""
    value_scale: float = 1.0
    """Factor of the values."""
    sinks: bool = False
    """Whether each query head has a learned score that takes part in its softmax as a key's does, with a value of zero."""
    sinks_name: str = "sinks"
    num_inputs: int = 1
    """Vectors of the model's width that it takes of each token, one behind the other."""
    name: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """One name: a tensor with the rows of all three, queries first."""
    qkv_runs: int = 1
    """That tensor has so many runs, each with the rows of as many heads, queries first."""
    out: str = "o_proj"
    transposed: bool = False
    """Whether the checkpoint holds the weights as [inputs, outputs]."""
    kv_head_replicas: int = 1
    """Number of devices that hold a copy of the same KV head; copies count as heads."""

    @property
    def group_size(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def flops_per_pair(self) -> float:
        """Operations for each query token and token that it sees, over all heads."""
        return 4.0 * self.num_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Values of all heads' outputs."""
        return self.num_heads * (self.value_dim or self.head_dim)

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's modules that each linear layer is made of."""
        parts = {"qkv": self.qkv} if self.value_dim is None else {"qkv": self.qkv[:2], "value": self.qkv[-1:]}
        parts |= {"gate": (self.gate.name,)} if self.gate is not None else {}
        return {part: tuple(f"{self.name}.{name}" for name in names) for part, names in (parts | {"out": (self.out,)}).items()}

    @property
    def values_per_token(self) -> int:
        """Intermediate values that a step has at once for each token, over all devices."""
        has_gate = self.gated or self.gate is not None
        return (3 * (self.num_heads + 2 * self.num_kv_heads) + has_gate * self.num_heads) * self.head_dim

    def indivisible(self, size: int) -> list[str]:
        """The numbers that keep this part from being split over `size` devices."""
        stored = self.num_kv_heads // self.kv_head_replicas
        faults = [f"{self.num_heads} query heads"] if self.num_heads % size else []
        return faults + ([f"{stored} KV heads"] if stored % size and size % stored else [])

    def split(self, size: int) -> "Attention":
        """With a copy of each KV head for every device where there are too few."""
        stored = self.num_kv_heads // self.kv_head_replicas
        replicas = max(1, size // stored)
        return replace(self, num_kv_heads=stored * replicas, kv_head_replicas=replicas)


@dataclass(frozen=True)
class TokenIndex:
    """Chooses the tokens that a query sees: those with the highest scores, sums over small heads of weight * relu(q . key).
    Source: arXiv:2512.02556, section 2.1.

    Its queries are products of the latents of queries, its keys and the weights of its heads of what attention takes. Of queries and
    keys the first values turn, as many and by the same angles as those of attention.
    """

    num_heads: int
    head_dim: int
    interleaved: bool
    """Whether checkpoints have the values that turn together next to each other."""
    key_norm: Norm
    name: str = "self_attn.indexer"


@dataclass(frozen=True)
class LatentAttention:
    """Attention over a latent vector per token, of which the keys and values of all heads are products. Source: arXiv:2405.04434.

    A head's query and key are a part that is multiplied with the latent and a part that is rotated; the rotated key is common to
    all heads.
    """

    num_heads: int
    latent_dim: int
    plain_dim: int
    """Values of a head's query and key that are not rotated."""
    rotated_dim: int
    value_dim: int
    """Values of a head's value."""
    rope: Rope | None
    """None: without positions; no value is rotated."""
    score_scale: float
    """Factor of the attention scores."""
    latent_norm: Norm
    query_norm: Norm | None = None
    """Norm of the queries' latents, if queries have latents."""
    query_dim: int | None = None
    """Width of these."""
    query_scale: QueryScale | None = None
    bias: bool = False
    """Whether the products that give latents, and the output, have biases."""
    gate: OutputGate | None = None
    top_k: int | None = None
    """Most tokens that a query sees, which are chosen; None: it sees all before it."""
    index: TokenIndex | None = None
    """The index that chooses them; None: they are those of the latest layer that has one."""
    name: str = "self_attn"
    out: str = "o_proj"
    copies: int = 1
    """Devices that hold the latents of all tokens: each needs them whole for its heads."""

    @property
    def window(self) -> int | None:
        """Keys that a token sees, as `Attention.window`; they need not be the latest."""
        return self.top_k

    @property
    def flops_per_pair(self) -> float:
        """Operations for each query token and token that it sees, over all heads, without those that choose the tokens."""
        return 2.0 * self.num_heads * (2 * self.latent_dim + self.rotated_dim)

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's modules that each linear layer is made of."""
        query, latents = ("q_proj", []) if self.query_dim is None else ("q_b_proj", ["q_a_proj"])
        latents.append("kv_a_proj_with_mqa")
        parts = {"latents": latents, "query": [query], "key_value": ["kv_b_proj"], "out": [self.out]}
        parts |= {"gate": [self.gate.name]} if self.gate is not None else {}
        if self.index is not None:
            within = self.index.name.removeprefix(f"{self.name}.")
            parts |= {"index_query": [f"{within}.wq_b"], "index_key": [f"{within}.wk"]}
        return {part: tuple(f"{self.name}.{name}" for name in names) for part, names in parts.items()}

    @property
    def values_per_token(self) -> int:
        """Intermediate values that a step has at once for each token, over all devices."""
        per_head = 3 * (self.latent_dim + self.rotated_dim) + self.plain_dim + self.value_dim
        whole = 3 * (self.latent_dim + self.rotated_dim + (self.query_dim or 0))
        if self.index is not None:
            whole += 3 * (self.index.num_heads + 1) * self.index.head_dim
        return self.num_heads * per_head + self.copies * whole

    def indivisible(self, size: int) -> list[str]:
        """The numbers that keep this part from being split over `size` devices."""
        return [f"{self.num_heads} query heads"] if self.num_heads % size else []

    def split(self, size: int) -> "LatentAttention":
        """With the latents on every device."""
        return replace(self, copies=size)


@dataclass(frozen=True)
class GatedDeltaNet(StateMixer):
    """Linear attention: each value head sums up the sequence in a matrix that maps keys to values. Source: arXiv:2412.06464.

    Queries, keys and values are products of x that go through a short convolution over the sequence first.
    """

    num_key_heads: int
    """Heads of keys and of queries."""
    num_value_heads: int
    key_dim: int
    """Values of a head's query and key."""
    value_dim: int
    """Values of a head's value."""
    kernel_size: int
    """Tokens that the convolution sees."""
    norm: Norm
    """Norm of each value head's output."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate that the normed output is multiplied by."""
    is_flat: bool = False
    """Whether the checkpoint has queries, keys and values of all heads one after the other, and the gates, the decays and the strengths
    apart, instead of two products in the order of the key heads."""
    name: str = "linear_attn"

    @property
    def group_size(self) -> int:
        """Value heads per key head (G)."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Values of a key head that go through the convolution: a query, a key, and the values of its value heads (C)."""
        return 2 * self.key_dim + self.group_size * self.value_dim

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return self.num_key_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes for a row and key head: the last inputs of the convolution, and the matrices of its value heads."""
        return (self.kernel_size - 1, self.num_channels), (self.group_size, self.key_dim, self.value_dim)

    def input_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Inputs of the convolution, and a rate of change and one of decay for each value head."""
        return (num_tokens, self.num_channels), (num_tokens, 2 * self.group_size)

    @property
    def flops_per_token(self) -> float:
        """The rule has two products with a matrix of each value head, and a change of it."""
        return 6.0 * self.num_value_heads * self.key_dim * self.value_dim

    @property
    def linears(self) -> dict[str, tuple[str, ...]]:
        letters = {"qkvz": ("qkv", "z") if self.is_flat else ("qkvz",), "ba": ("b", "a") if self.is_flat else ("ba",)}
        products = {part: tuple(f"{self.name}.in_proj_{each}" for each in found) for part, found in letters.items()}
        return {**products, "out": (f"{self.name}.out_proj",)}

    @property
    def values_per_token(self) -> int:
        return 8 * self.num_key_heads * self.num_channels

    def indivisible(self, size: int) -> list[str]:
        return [f"{self.num_key_heads} key heads of linear attention"] if self.num_key_heads % size else []
