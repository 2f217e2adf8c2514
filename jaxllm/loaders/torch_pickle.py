"""Interprets the pickles of torch.save that hold tensors by name, without Python's pickle: nothing of a file is called, hashed or compared.

A pickle is a program of a stack machine, which `pickletools` splits into operations and arguments. Only those operations are known here
that torch.save writes for tensors, in protocols 2 to 5; keys of dictionaries are strings, and each size is limited.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import shortened
from jaxllm.loaders.checkpoint import MAX_DIMS, MAX_NAME

MAX_BYTES = 16 * 2**20
"""Size of a pickle: a tensor takes some 200."""
MAX_OPERATIONS = 2_000_000
"""Operations in a pickle: 50 000 tensors. One makes an object of at most 100 bytes."""
OPERATIONS_PER_TENSOR = 64
"""At most; torch.save writes some 32."""
MAX_MEMO = 500_000
"""Values that are kept to be used again: ten of a tensor."""
MAX_STACK = 200_000
"""Values at a time: torch.save writes 1000 members of a dictionary at once."""
_MAX_INTEGER_BITS = 64
_MAX_ARGUMENTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Values that tensors are views of: a member of the archive."""

    dtype: np.dtype
    key: str


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A view of a storage; offset and strides count values, and may be negative."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NotNeededError(ValueError):
    """A file names a function or class that weights do not need. The message is the name."""


def unpickle(data: bytes, max_operations: int = MAX_OPERATIONS) -> Any:
    """The value of a pickle: tensors as `Tensor`, and dictionaries, lists, tuples, strings, numbers, booleans and None.

    Raises ValueError if it exceeds a limit, is truncated, or has what weights do not need.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"its pickle has {len(data)} bytes, at most {MAX_BYTES} are read")
    stack: list[Any] = []
    marks: list[int] = []
    """Sizes of the stack where the values of tuples, lists and dictionaries begin."""
    memo: dict[int, Any] = {}

    def last(count: int | None = None) -> list[Any]:
        """Take so many values from the stack; default: those since the latest mark."""
        start = marks.pop() if count is None else len(stack) - count
        if not 0 <= start <= len(stack):
            raise IndexError
        values = stack[start:]
        del stack[start:]
        return values

    argument: Any
    try:
        for number, (operation, argument, position) in enumerate(pickletools.genops(data)):
            name = operation.name
            if name == "STOP":
                return stack.pop()
            if number == max_operations:
                raise ValueError(f"its pickle has more than {max_operations} operations, the limit")
            match name:  # by pickletools' names, which are Python's; frequent ones first
                case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                    memo[len(memo) if argument is None else argument] = stack[-1]
                    if len(memo) > MAX_MEMO:
                        raise ValueError(f"its pickle keeps more than {MAX_MEMO} values")
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "BININT1" | "BININT" | "BININT2" | "NONE" | "BINFLOAT":
                    stack.append(argument)
                case "BINUNICODE" | "SHORT_BINUNICODE":
                    stack.append(_text(argument))
                case "MARK":
                    marks.append(len(stack))
                case "TUPLE":
                    stack.append(_tuple(last()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(_tuple(last(int(name[-1]))))
                case "EMPTY_TUPLE":
                    stack.append(())
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(name == "NEWTRUE")
                case "BINPERSID":
                    stack.append(_storage(stack.pop()))
                case "REDUCE":
                    function, arguments = last(2)
                    if not callable(function):  # only what _NAMES has is
                        raise TypeError
                    stack.append(function(*_typed(tuple, arguments)))
                case "EMPTY_DICT":
                    stack.append({})
                case "SETITEM" | "SETITEMS":
                    values = last(2 if name == "SETITEM" else None)
                    _set_items(_typed(dict, stack[-1]), values)
                case "EMPTY_LIST":
                    stack.append([])
                case "APPEND" | "APPENDS":
                    values = last(1 if name == "APPEND" else None)
                    _typed(list, stack[-1]).extend(values)
                case "GLOBAL":
                    stack.append(_named(argument))
                case "STACK_GLOBAL":
                    stack.append(_named(" ".join(_typed(str, part) for part in last(2))))
                case "LONG1":
                    if (bits := argument.bit_length()) > _MAX_INTEGER_BITS:
                        raise ValueError(f"its pickle has an integer of {bits} bits, at most {_MAX_INTEGER_BITS} make sense")
                    stack.append(argument)
                case "BUILD":  # attributes of a dictionary, which weights do not need
                    stack.pop()
                    _typed(dict, stack[-1])
                case "PROTO" | "FRAME":  # a frame's size is there to read ahead
                    pass
                case _:
                    raise ValueError(f"its pickle has the operation {name} at byte {position}, which weights do not need")
            if len(stack) + len(marks) > MAX_STACK:
                raise ValueError(f"its pickle has more than {MAX_STACK} values on its stack")
    except (IndexError, KeyError, TypeError) as error:  # too few values on the stack, or those of other types
        raise ValueError(f"its pickle is broken ({type(error).__name__})") from error


def _typed(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _text(value: str) -> str:
    if (size := len(value.encode())) > MAX_NAME:  # raises ValueError for what is no valid Unicode
        raise ValueError(f"its pickle has a text of {size} bytes, at most {MAX_NAME} make sense")
    return value


def _tuple(values: list[Any]) -> tuple[Any, ...]:
    """A tuple of arguments or of a shape. Freeing or traversing endlessly nested tuples would block all threads."""
    inner = [value for value in values if type(value) is tuple]
    if len(values) > (_MAX_ARGUMENTS if inner else MAX_DIMS) or any(tuple in map(type, value) for value in inner):
        raise ValueError(f"its pickle has a tuple of more than {MAX_DIMS} values, or tuples in tuples in tuples")
    return tuple(values)


def _set_items(target: dict[str, Any], values: list[Any]) -> None:
    if len(values) % 2:
        raise TypeError
    for key in values[::2]:
        if type(key) is not str:
            raise ValueError(f"its pickle has a dictionary with a key of type {type(key).__name__}, must be a string")
    target.update(zip(values[::2], values[1::2], strict=True))


def _storage(saved_id: Any) -> Storage:
    kind, dtype, key, *_ = _typed(tuple, saved_id)
    if _typed(str, kind) != "storage" or not isinstance(dtype, np.dtype):
        raise TypeError
    return Storage(dtype, _typed(str, key))


def _named(name: str) -> Any:
    """The substitute of a module and a name in it."""
    if name not in _NAMES:
        raise NotNeededError(shortened(name.replace(" ", ".")))
    return _NAMES[name]


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    if not isinstance(storage, Storage) or type(offset) is not int:
        raise ValueError("a tensor has no storage or no offset")
    for sizes in (shape, strides):
        if type(sizes) is not tuple or not all(type(size) is int for size in sizes):
            raise ValueError("a tensor's shape or strides are no tuple of whole numbers")
    if len(shape) != len(strides):
        raise ValueError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    return Tensor(storage, offset, shape, strides)


def _rebuild_parameter(tensor: Any, *_: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError("a parameter is no tensor")
    return tensor


def _new_dictionary() -> dict[str, Any]:
    return {}


_NAMES: Mapping[str, Callable[..., Any] | np.dtype] = {
    "collections OrderedDict": _new_dictionary,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch HalfStorage": np.dtype(np.float16),
    "torch FloatStorage": np.dtype(np.float32),
    "torch DoubleStorage": np.dtype(np.float64),
    "torch LongStorage": np.dtype(np.int64),
    "torch IntStorage": np.dtype(np.int32),
    "torch ShortStorage": np.dtype(np.int16),
    "torch CharStorage": np.dtype(np.int8),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch BoolStorage": np.dtype(np.bool_),
}
"""Modules and names that a file may use, and their substitutes here: nothing of PyTorch, and nothing else, is ever called."""
