"""Contents of the KV cache by layer, and the layers that share blocks. Plain numbers, no arrays.

    layers    0 1 2 3 4 5 6 7 8      full attention in layers 2, 5 and 8, a sliding window in the others
    groups    [2 5 8] [0 1 3] [4 6 7]    layers of one policy, all groups of the same size
    arrays     2       0       4         keys and values: the first layer of every group
                 5       1       6       the second
                   8       3       7     the third

A block belongs to one group at a time, so the layers below each other above share their arrays: a block of an array holds the keys
or values of whichever group the block belongs to. All groups take their blocks from one pool. A model whose layers all have one
policy has one group, and arrays for each layer.

Where the heads of one policy are wider than those of another, a block of an array holds several layers of the smaller keys, one
behind the other: seen as an array of so many times the blocks, it has block b of the i-th of n layers in place n b + i. With n = 1
the array is seen with other heads alone.

A layer that reads the keys and values of an earlier one is in no group, and has the place of that layer. Layers that keep a state by
row are in no group either; their arrays come behind those of blocks.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from jaxllm.cache_policy import FULL, CachePolicy, WindowPolicy, num_blocks_for
from jaxllm.errors import ConfigError
from jaxllm.model_config import FP8, ModelConfig
from jaxllm.model_parts import CrossAttentionLayer, LatentAttention, StateMixer, TokenMixer

_BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4, FP8: 1}
WORD_BYTES = 4
"""Contents of blocks are copied and checked in such words."""
_MOST_PADDING = 6
"""The last group of a policy may be too small by one in so many of the policy's layers."""


@dataclass(frozen=True)
class CacheArray:
    """One array of a layer: [blocks, num_heads, block size, width]. Devices split it by heads, or by copies of latents."""

    num_heads: int
    width: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.width * _BYTES_PER_VALUE[self.dtype]


@dataclass(frozen=True)
class StateArray:
    """One array of a layer: [rows, num_heads, *shape]. Devices split it by heads."""

    num_heads: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes_per_row(self) -> int:
        return self.num_heads * math.prod(self.shape) * _BYTES_PER_VALUE[self.dtype]


class CacheSpec(Protocol):
    """Arrays of one layer in blocks."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]: ...

    @property
    def policy(self) -> CachePolicy: ...


@dataclass(frozen=True)
class FullCache:
    """Keys and values of all tokens."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """Keys, values."""
        return (CacheArray(self.num_kv_heads, self.head_dim, self.dtype),) * 2

    @property
    def policy(self) -> CachePolicy:
        return FULL


@dataclass(frozen=True)
class WindowCache(FullCache):
    """Keys and values of the latest `window` tokens."""

    window: int

    @property
    def policy(self) -> CachePolicy:
        return WindowPolicy(self.window)


@dataclass(frozen=True)
class LatentCache:
    """A vector of all tokens that all heads share, with a copy for each device."""

    num_copies: int
    width: int
    dtype: str
    key: tuple[int, str] | None = None
    """Width and type of the keys by which tokens are chosen; None: they are not chosen here."""

    @property
    def arrays(self) -> tuple[CacheArray, ...]:
        """Vectors, keys."""
        sizes = [(self.width, self.dtype)] + ([] if self.key is None else [self.key])
        return tuple(CacheArray(self.num_copies, *size) for size in sizes)

    @property
    def policy(self) -> CachePolicy:
        return FULL


@dataclass(frozen=True)
class NoCache:
    """Nothing: an encoder computes a prompt in one step. Requests hold blocks all the same, which have no bytes."""

    arrays: tuple[CacheArray, ...] = ()

    @property
    def policy(self) -> CachePolicy:
        return FULL


@dataclass(frozen=True)
class RowState:
    """Arrays of a fixed size for each running request, which sum up all its tokens: no blocks.

    They belong to the request's row on the device, and nothing clears them when the row gets another owner: a step that computes the
    token at position 0 begins with zeros, whatever the arrays hold. So a preempted request, which is computed from its beginning
    again, needs no care. Nor does a request that ends with steps in flight that still compute it: they write a row that is free or
    has been given away, but the device runs steps in order, and the next owner's first step, planned later, reads none of it. What
    the last row holds, which padding writes to, is never read.

    Every token changes the state, so each must be computed once and in order: those of a cached prefix can be skipped only where the
    state behind them was kept too.
    """

    arrays: tuple[StateArray, ...]
    keeps_inputs: bool = False
    """Whether inputs of the latest tokens are kept too, so that wrong drafts do not change the state: see `jaxllm.layers.latest_inputs`."""

    @property
    def bytes_per_row(self) -> int:
        return sum(array.bytes_per_row for array in self.arrays)


@dataclass(frozen=True)
class EncodedState(RowState):
    """Keys and values that a layer has of what an encoder computed for each running request.

    Unlike other states, they are written before the request's first step, as a whole and anew when it is computed from its beginning
    again, and no step changes them.
    """


@dataclass(frozen=True)
class SharedCache:
    """Keys and values of an earlier layer, which alone writes them."""

    layer: int


def written_spec(specs: "Sequence[CacheSpec | RowState | SharedCache]", layer: int) -> CacheSpec | RowState:
    """The spec of a layer, or of the one whose keys and values it reads."""
    spec = specs[layer]
    while isinstance(spec, SharedCache):
        spec = specs[spec.layer]
    return spec


def cache_specs(
    config: ModelConfig, *, disable_windows: bool = False, num_drafts: int = 0
) -> tuple[CacheSpec | RowState | SharedCache, ...]:
    """The spec of each layer of a model; behind them, in the same order, those of layers' attention to an encoder (`encoded_layer`).
    disable_windows: layers with a sliding window keep all tokens too. num_drafts: most of a row in a step."""
    of_layers = tuple(_spec(layer.attention, config, disable_windows, num_drafts) for layer in config.layers)
    return (*of_layers, *(_encoded(layer, config) for layer in config.layers if isinstance(layer, CrossAttentionLayer)))


def encoded_layer(config: ModelConfig, layer: int) -> int:
    """Where `cache_specs` has the attention of a layer to an encoder. All layers have one."""
    return config.num_layers + layer


def _encoded(layer: CrossAttentionLayer, config: ModelConfig) -> EncodedState:
    assert config.audio is not None and layer.cross is not None
    shape = (config.audio.num_positions, layer.cross.head_dim)
    return EncodedState((StateArray(layer.cross.num_kv_heads, shape, config.dtype),) * 2)


def row_bytes(config: ModelConfig) -> int:
    """`CacheLayout.row_bytes` of a model."""
    return sum(spec.bytes_per_row for spec in cache_specs(config) if isinstance(spec, RowState))


def _spec(
    attention: TokenMixer | None, config: ModelConfig, disable_windows: bool, num_drafts: int
) -> CacheSpec | RowState | SharedCache:
    dtype = config.kv_cache_dtype
    if attention is None:
        return RowState(())
    if isinstance(attention, StateMixer):
        types = (config.dtype, "float32") if attention.has_convolution else ("float32",)
        shapes = zip(attention.state_shapes, types, strict=False)
        arrays = tuple(StateArray(attention.state_heads, shape, dtype) for shape, dtype in shapes)
        if not num_drafts:
            return RowState(arrays)
        latest = (StateArray(attention.state_heads, shape, config.dtype) for shape in attention.input_shapes(1 + num_drafts))
        return RowState((*arrays, *latest, StateArray(attention.state_heads, (1,), "float32")), keeps_inputs=True)
    if isinstance(attention, LatentAttention):
        key = None if attention.index is None else (attention.index.head_dim, config.dtype)
        return LatentCache(attention.copies, attention.latent_dim + attention.rotated_dim, dtype, key)
    if config.encoder is not None:
        return NoCache()
    if attention.reads_layer is not None:
        return SharedCache(attention.reads_layer)
    shape = (attention.num_kv_heads, attention.head_dim, dtype)
    return FullCache(*shape) if attention.window is None or disable_windows else WindowCache(*shape, attention.window)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that have a block table in common."""

    policy: CachePolicy
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheView:
    """One of the layers in each block of an array with other heads than theirs."""

    num_layers: int
    index: int
    num_heads: int
    width: int


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer finds what it keeps."""

    group: int | None
    """None: a state by row."""
    arrays: tuple[int, ...]
    """Indices in `CacheLayout.arrays` and, behind them, `CacheLayout.states`."""
    view: "CacheView | None" = None
    """How blocks of these arrays hold its keys; None: as they are."""


_ELSEWHERE = LayerPlace(None, ())
"""Place of a layer of another stage."""


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a model: its arrays, its groups of layers, and the blocks that a request holds."""

    groups: tuple[CacheGroup, ...]
    arrays: tuple[CacheArray, ...]
    states: tuple[StateArray, ...]
    """Arrays of layers that keep a state by row."""
    places: tuple[LayerPlace, ...]
    """By layer."""
    block_size: int
    max_step_tokens: int
    """Most tokens of a request that one step computes."""
    keeps_inputs: bool = False
    """Whether there are states by row with inputs of the latest tokens: see `RowState`."""

    @property
    def policies(self) -> tuple[CachePolicy, ...]:
        """By group."""
        return tuple(group.policy for group in self.groups)

    @property
    def layers_per_block(self) -> int:
        """Most layers of which a block of an array holds keys."""
        return max((place.view.num_layers for place in self.places if place.view is not None), default=1)

    @property
    def has_views(self) -> bool:
        """Whether arrays hold keys of layers with other heads than theirs."""
        return any(place.view is not None for place in self.places)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all arrays, over all devices."""
        return self.block_size * sum(array.bytes_per_token for array in self.arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the states of all layers, over all devices."""
        return sum(array.bytes_per_row for array in self.states)

    @property
    def state_parts(self) -> int:
        """Equal parts of the states of a row, each of whole heads of every array: devices split them as they do heads."""
        return math.gcd(*(array.num_heads for array in self.states))

    @property
    def state_part_words(self) -> int:
        """Words of four bytes of one part, each array in whole words."""
        return sum(-(-array.bytes_per_row // (self.state_parts * WORD_BYTES)) for array in self.states)

    @property
    def state_blocks(self) -> int:
        """Blocks that hold the states of a row, in each of which each part of them has an equal one; 0: there are no states. Raises
        ConfigError for states that blocks cannot hold."""
        if not self.states:
            return 0
        part_words = self.block_bytes // WORD_BYTES // self.state_parts
        if not part_words:
            raise ConfigError(
                f"block_size is {self.block_size}: blocks of {self.block_bytes} bytes cannot hold states in {self.state_parts} parts, by "
                "which prefixes are continued; raise block_size, or use --no-enable-prefix-caching and leave kv_role out"
            )
        return -(-self.state_part_words // part_words)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at a time."""
        return num_blocks_for(self.policies, num_tokens, self.block_size, self.max_step_tokens)

    def max_tokens(self, num_blocks: int) -> int:
        """Longest request, in tokens and up to 2**31, that never holds more than `num_blocks` blocks."""
        return bisect.bisect_right(range(1, 2**31), num_blocks, key=self.num_blocks_for)

    def of_layers(self, layers: range) -> "CacheLayout":
        """The cache of one stage of a pipeline. All stages have the groups and block tables of the whole model, and arrays for their own
        layers: these are distributed evenly to the groups of their policy, whatever groups they are in here."""
        assert not self.has_views, "models with such caches are not divided into stages"
        indices: dict[int, tuple[int, int]] = {}  # layer -> its group, and its place in that
        for policy in dict.fromkeys(self.policies):
            numbers = [number for number, group in enumerate(self.groups) if group.policy == policy]
            own = sorted(layer for number in numbers for layer in self.groups[number].layers if layer in layers)
            size = -(-len(own) // len(numbers))
            indices |= {layer: (numbers[i // size], i % size) for i, layer in enumerate(own)}
        groups = [
            CacheGroup(group.policy, tuple(layer for layer, (own, _) in indices.items() if own == number))
            for number, group in enumerate(self.groups)
        ]
        arrays: dict[tuple[int, int, CacheArray], int] = {}
        places = [_ELSEWHERE] * len(self.places)
        for layer, (number, index) in sorted(indices.items(), key=lambda item: item[1][::-1]):
            keys = [(index, part, self.arrays[array]) for part, array in enumerate(self.places[layer].arrays)]
            places[layer] = LayerPlace(number, tuple(arrays.setdefault(key, len(arrays)) for key in keys))
        states: list[StateArray] = []
        for layer in layers:
            if self.places[layer].group is None:
                first = len(arrays) + len(states)
                states += [self.states[index - len(self.arrays)] for index in self.places[layer].arrays]
                places[layer] = LayerPlace(None, tuple(range(first, len(arrays) + len(states))))
        kept = tuple(array for _, _, array in arrays)
        return replace(self, groups=tuple(groups), arrays=kept, states=tuple(states), places=tuple(places))


def cache_layout(specs: Sequence[CacheSpec | RowState | SharedCache], *, block_size: int, max_step_tokens: int) -> CacheLayout:
    """Group the layers: full attention first, then by the first layer of a policy.

    Raises ConfigError for a model in which no layer keeps blocks: they are how requests are admitted and limited.
    """
    in_blocks = {layer: spec for layer, spec in enumerate(specs) if not isinstance(spec, (RowState, SharedCache))}
    if not in_blocks:
        raise ConfigError(
            "no layer of the model has a KV cache, only states by row; a model needs a layer with attention to run here"
        )
    layers_of: dict[CachePolicy, list[int]] = {}
    for layer, spec in sorted(in_blocks.items(), key=lambda item: item[1].policy != FULL):
        layers_of.setdefault(spec.policy, []).append(layer)
    widest, per_block = _in_one_block(layers_of, in_blocks)
    size = _group_size({policy: -(-len(layers) // per_block[policy]) for policy, layers in layers_of.items()})
    groups = [
        CacheGroup(policy, tuple(layers[start : start + size * per_block[policy]]))
        for policy, layers in layers_of.items()
        for start in range(0, len(layers), size * per_block[policy])
    ]
    # Layers at the same index of their groups share arrays that are alike.
    arrays: dict[tuple[int, int, CacheArray], int] = {}
    places: dict[int, LayerPlace] = {}
    for index in range(size):
        for number, group in enumerate(groups):
            num_layers = per_block[group.policy]
            for i, layer in enumerate(group.layers[index * num_layers : (index + 1) * num_layers]):
                own = in_blocks[layer].arrays
                kept_in = own if widest is None else widest
                keys = [(index, part, array) for part, array in enumerate(kept_in)]
                view = None if kept_in == own else CacheView(num_layers, i, own[0].num_heads, own[0].width)
                places[layer] = LayerPlace(number, tuple(arrays.setdefault(key, len(arrays)) for key in keys), view)
    states: list[StateArray] = []
    for layer, kept in enumerate(specs):
        if isinstance(kept, RowState):
            first = len(arrays) + len(states)
            places[layer] = LayerPlace(None, tuple(range(first, first + len(kept.arrays))))
            states += kept.arrays
    places |= {layer: places[spec.layer] for layer, spec in enumerate(specs) if isinstance(spec, SharedCache)}
    return CacheLayout(
        tuple(groups),
        tuple(array for _, _, array in arrays),
        tuple(states),
        tuple(places[layer] for layer in range(len(specs))),
        block_size,
        max_step_tokens,
        any(isinstance(spec, RowState) and spec.keeps_inputs for spec in specs),
    )


def _in_one_block(
    layers_of: Mapping[CachePolicy, Sequence[int]], specs: Mapping[int, CacheSpec]
) -> tuple[tuple[CacheArray, ...] | None, dict[CachePolicy, int]]:
    """The largest arrays of a policy's layers, and how many layers of each policy a block of them holds. None, and one of each, unless
    all layers of a policy are alike, heads differ in width, and the smaller divide the largest."""
    alike = {policy: {specs[layer].arrays for layer in layers} for policy, layers in layers_of.items()}
    kinds = {policy: next(iter(found)) for policy, found in alike.items()}
    widest = max(kinds.values(), key=lambda arrays: sum(array.bytes_per_token for array in arrays))
    plain = dict.fromkeys(layers_of, 1)
    if (
        any(len(found) > 1 for found in alike.values())
        or len({array.width for arrays in kinds.values() for array in arrays}) <= 1
    ):
        return None, plain
    counts = {policy: count for policy, arrays in kinds.items() if (count := _times(widest, arrays))}
    return (widest, counts) if len(counts) == len(kinds) else (None, plain)


def _times(whole: Sequence[CacheArray], parts: Sequence[CacheArray]) -> int | None:
    """How many times the parts fit into the whole exactly; None: they do not."""
    if len(whole) != len(parts) or any(a.dtype != b.dtype for a, b in zip(whole, parts, strict=True)):
        return None
    counts = {divmod(a.bytes_per_token, b.bytes_per_token) for a, b in zip(whole, parts, strict=True)}
    (count, rest), *others = counts
    return None if rest or others else count


def _group_size(num_arrays: Mapping[CachePolicy, int]) -> int:
    """Arrays of keys of a group, so that there are few groups and the last of a policy is not much smaller than the others.
    num_arrays: that all layers of a policy fill.

    The blocks of a small group leave arrays unused. Full attention, whose blocks grow with the context, gets no small group.
    """

    def padding(size: int) -> dict[CachePolicy, int]:
        return {policy: -count % size for policy, count in num_arrays.items()}

    def fits(size: int) -> bool:
        most = {policy: 0 if policy == FULL else count // _MOST_PADDING for policy, count in num_arrays.items()}
        return all(count <= most[policy] for policy, count in padding(size).items())

    def num_layers(size: int) -> int:
        return sum(num_arrays.values()) + sum(padding(size).values())

    sizes = filter(fits, range(1, max(num_arrays.values()) + 1))
    return min(sizes, key=lambda size: (num_layers(size) // size, num_layers(size)))
