"""Interprets the pickles of torch.save that hold tensors by name, without Python's pickle: nothing of a file is called, hashed or compared.

A pickle is a program of a stack machine. Only those of its operations are known that torch.save writes for tensors, in protocols 2 to 5;
keys of dictionaries are strings, and each size is limited.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.loaders.checkpoint import DTYPES, MAX_DIMS, MAX_NAME

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
_MAX_INTEGER_BYTES = 8
_MAX_ARGUMENTS = 8


@dataclass(frozen=True, slots=True)
class StorageType:
    """A type of values, by safetensors' name."""

    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Values that tensors are views of: a member of the archive."""

    type: StorageType
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
    try:
        return _Machine(data).run(max_operations)
    except (IndexError, KeyError, TypeError) as error:  # too few values on the stack, or those of other types
        raise ValueError(f"its pickle is broken ({type(error).__name__})") from error


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


_STORAGES = {
    "BFloat16": "BF16",
    "Half": "F16",
    "Float": "F32",
    "Double": "F64",
    "Long": "I64",
    "Int": "I32",
    "Short": "I16",
    "Char": "I8",
    "Byte": "U8",
    "Bool": "BOOL",
}
"""PyTorch's types of storages by safetensors' names."""
_SIZES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, **{code: dtype.itemsize for code, dtype in DTYPES.items()}}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _new_dictionary,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
}
_NAMES: Mapping[str, Callable[..., Any] | StorageType] = {
    **_FUNCTIONS,
    **{f"torch.{name}Storage": StorageType(code, _SIZES[code]) for name, code in _STORAGES.items()},
}
"""Names that a file may use, and their substitutes here: nothing of PyTorch, and nothing else, is ever called."""


class _Machine:
    def __init__(self, data: bytes):
        self._data, self._position = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Sizes of the stack where the values of tuples, lists and dictionaries begin."""
        self._memo: dict[int, Any] = {}

    def run(self, max_operations: int) -> Any:
        data, stack = self._data, self._stack
        for _ in range(max_operations):
            code = data[self._position]
            self._position += 1
            if code == _STOP:
                return stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(
                    f"its pickle has the operation {code:#x} at byte {self._position - 1}, which weights do not need"
                )
            operation(self)
            if len(stack) + len(self._marks) > MAX_STACK:
                raise ValueError(f"its pickle has more than {MAX_STACK} values on its stack")
        raise ValueError(f"its pickle has more than {max_operations} operations, the limit")

    def _take(self, size: int) -> bytes:
        start = self._position
        self._position = end = start + size
        if end > len(self._data):
            raise ValueError(f"its pickle ends at byte {len(self._data)}, within a value")
        return self._data[start:end]

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        if not 0 <= start <= len(self._stack):
            raise IndexError
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def skip(self, size: int) -> None:
        """The number of a protocol, or the size of a frame, which is there to read ahead."""
        self._take(size)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def new_list(self) -> None:
        self._stack.append([])

    def new_dictionary(self) -> None:
        self._stack.append({})

    def unsigned(self, size: int) -> None:
        self._stack.append(self._unsigned(size))

    def signed(self, size: int) -> None:
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def long(self) -> None:
        size = self._unsigned(1)
        if size > _MAX_INTEGER_BYTES:
            raise ValueError(f"its pickle has an integer of {size} bytes, at most {_MAX_INTEGER_BYTES} make sense")
        self.signed(size)

    def float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, size: int) -> None:
        """size: of the text's length."""
        length = self._unsigned(size)
        if length > MAX_NAME:
            raise ValueError(f"its pickle has a text of {length} bytes, at most {MAX_NAME} make sense")
        self._stack.append(self._take(length).decode())

    def tuple(self, size: int) -> None:
        self._marks.append(len(self._stack) - size)
        self.marked_tuple()

    def marked_tuple(self) -> None:
        """Push a tuple of arguments or of a shape. Freeing or traversing endlessly nested tuples would block all threads."""
        values = tuple(self._since_mark())
        inner = [value for value in values if type(value) is tuple]
        if len(values) > (_MAX_ARGUMENTS if inner else MAX_DIMS) or any(tuple in map(type, value) for value in inner):
            raise ValueError(f"its pickle has a tuple of more than {MAX_DIMS} values, or tuples in tuples in tuples")
        self._stack.append(values)

    def put(self, size: int) -> None:
        self._keep(self._unsigned(size))

    def put_next(self) -> None:
        self._keep(len(self._memo))

    def _keep(self, index: int) -> None:
        self._memo[index] = self._stack[-1]
        if len(self._memo) > MAX_MEMO:
            raise ValueError(f"its pickle keeps more than {MAX_MEMO} values")

    def get(self, size: int) -> None:
        self._stack.append(self._memo[self._unsigned(size)])

    def named(self) -> None:
        start = self._position
        middle = self._data.index(b"\n", start, start + MAX_NAME)
        end = self._data.index(b"\n", middle + 1, middle + MAX_NAME)
        self._position = end + 1
        self._find(self._data[start:middle].decode(), self._data[middle + 1 : end].decode())

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(module) is not str or type(name) is not str:
            raise TypeError
        self._find(module, name)

    def _find(self, module: str, name: str) -> None:
        found = _NAMES.get(f"{module}.{name}")
        if found is None:
            raise NotNeededError(f"{module}.{name}")
        self._stack.append(found)

    def storage(self) -> None:
        saved_id = self._stack.pop()
        if type(saved_id) is not tuple or len(saved_id) < 3:
            raise TypeError
        kind, storage_type, key = saved_id[:3]
        if type(kind) is not str or kind != "storage" or not isinstance(storage_type, StorageType) or type(key) is not str:
            raise TypeError
        self._stack.append(Storage(storage_type, key))

    def call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple or not callable(function):  # only what _NAMES has is
            raise TypeError
        self._stack.append(function(*arguments))

    def set_attributes(self) -> None:
        """Ignore attributes of a dictionary, which weights do not need."""
        self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise TypeError

    def append(self) -> None:
        self._extend([self._stack.pop()])

    def extend(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError
        self._stack[-1].extend(values)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, values: list[Any]) -> None:
        target, keys = self._stack[-1], values[::2]
        if type(target) is not dict or len(values) % 2:
            raise TypeError
        for key in keys:
            if type(key) is not str:
                raise ValueError(f"its pickle has a dictionary with a key of type {type(key).__name__}, must be a string")
        target.update(zip(keys, values[1::2], strict=True))


_STOP = ord(".")
_OPERATIONS: Mapping[int, Callable[[_Machine], None]] = {
    0x80: lambda machine: machine.skip(1),  # the protocol
    0x95: lambda machine: machine.skip(8),  # a frame
    ord("("): _Machine.mark,
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord(")"): lambda machine: machine.push(()),
    ord("]"): _Machine.new_list,
    ord("}"): _Machine.new_dictionary,
    ord("K"): lambda machine: machine.unsigned(1),
    ord("M"): lambda machine: machine.unsigned(2),
    ord("J"): lambda machine: machine.signed(4),
    0x8A: _Machine.long,
    ord("G"): _Machine.float,
    ord("X"): lambda machine: machine.text(4),
    0x8C: lambda machine: machine.text(1),
    0x85: lambda machine: machine.tuple(1),
    0x86: lambda machine: machine.tuple(2),
    0x87: lambda machine: machine.tuple(3),
    ord("t"): _Machine.marked_tuple,
    ord("q"): lambda machine: machine.put(1),
    ord("r"): lambda machine: machine.put(4),
    0x94: _Machine.put_next,
    ord("h"): lambda machine: machine.get(1),
    ord("j"): lambda machine: machine.get(4),
    ord("c"): _Machine.named,
    0x93: _Machine.named_on_stack,
    ord("Q"): _Machine.storage,
    ord("R"): _Machine.call,
    ord("b"): _Machine.set_attributes,
    ord("a"): _Machine.append,
    ord("e"): _Machine.extend,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
}
"""Operations of the machine by their codes."""
