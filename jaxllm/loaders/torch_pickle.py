"""Interprets the pickles of torch.save that hold tensors by name, without Python's pickle: nothing of a file is called, hashed or compared.

A pickle is a program of a stack machine, which `pickletools` splits into operations and arguments. Only those operations are known here
that torch.save writes for tensors, in protocols 2 to 5; keys of dictionaries are strings, and each size is limited.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    stack, operations = _Stack(), _OPERATIONS
    values, marks = stack.values, stack.marks
    try:
        for count, (operation, argument, position) in enumerate(pickletools.genops(data)):
            name = operation.name
            if name == "STOP":
                return values.pop()
            if count == max_operations:
                raise ValueError(f"its pickle has more than {max_operations} operations, the limit")
            if name not in operations:
                raise ValueError(f"its pickle has the operation {name} at byte {position}, which weights do not need")
            operations[name](stack, argument)
            if len(values) + len(marks) > MAX_STACK:
                raise ValueError(f"its pickle has more than {MAX_STACK} values on its stack")
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
    "BFloat16": StorageType("BF16", 2),
    "Half": StorageType("F16", 2),
    "Float": StorageType("F32", 4),
    "Double": StorageType("F64", 8),
    "Long": StorageType("I64", 8),
    "Int": StorageType("I32", 4),
    "Short": StorageType("I16", 2),
    "Char": StorageType("I8", 1),
    "Byte": StorageType("U8", 1),
    "Bool": StorageType("BOOL", 1),
}
"""By PyTorch's names."""
_NAMES: Mapping[str, Callable[..., Any] | StorageType] = {
    "collections OrderedDict": _new_dictionary,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    **{f"torch {name}Storage": kind for name, kind in _STORAGES.items()},
}
"""Modules and names that a file may use, and their substitutes here: nothing of PyTorch, and nothing else, is ever called."""


class _Stack:
    """The values of a pickle, and its operations with their arguments."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.marks: list[int] = []
        """Sizes of the stack where the values of tuples, lists and dictionaries begin."""
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.values.append(value)

    def pop(self) -> Any:
        return self.values.pop()

    def mark(self, _: None) -> None:
        self.marks.append(len(self.values))

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        if not 0 <= start <= len(self.values):
            raise IndexError
        values = self.values[start:]
        del self.values[start:]
        return values

    def integer(self, value: int) -> None:
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise ValueError(f"its pickle has an integer of {value.bit_length()} bits, at most {_MAX_INTEGER_BITS} make sense")
        self.push(value)

    def text(self, value: str) -> None:
        if (size := len(value.encode())) > MAX_NAME:  # raises ValueError for what is no valid Unicode
            raise ValueError(f"its pickle has a text of {size} bytes, at most {MAX_NAME} make sense")
        self.push(value)

    def tuple_of(self, size: int) -> None:
        self.marks.append(len(self.values) - size)
        self.marked_tuple(None)

    def marked_tuple(self, _: None) -> None:
        """Push a tuple of arguments or of a shape. Freeing or traversing endlessly nested tuples would block all threads."""
        values = tuple(self._since_mark())
        inner = [value for value in values if type(value) is tuple]
        if len(values) > (_MAX_ARGUMENTS if inner else MAX_DIMS) or any(tuple in map(type, value) for value in inner):
            raise ValueError(f"its pickle has a tuple of more than {MAX_DIMS} values, or tuples in tuples in tuples")
        self.push(values)

    def put(self, index: int | None) -> None:
        """index: None: the next."""
        self._memo[len(self._memo) if index is None else index] = self.values[-1]
        if len(self._memo) > MAX_MEMO:
            raise ValueError(f"its pickle keeps more than {MAX_MEMO} values")

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def named(self, name: str | None) -> None:
        """name: the module and the name in it; None: they are on the stack."""
        if name is None:
            last, module = self.pop(), self.pop()
            if type(module) is not str or type(last) is not str:
                raise TypeError
            name = f"{module} {last}"
        if name not in _NAMES:
            raise NotNeededError(shortened(name.replace(" ", ".")))
        self.push(_NAMES[name])

    def storage(self, _: None) -> None:
        saved_id = self.pop()
        if type(saved_id) is not tuple or len(saved_id) < 3:
            raise TypeError
        kind, storage_type, key = saved_id[:3]
        if type(kind) is not str or kind != "storage" or not isinstance(storage_type, StorageType) or type(key) is not str:
            raise TypeError
        self.push(Storage(storage_type, key))

    def call(self, _: None) -> None:
        arguments, function = self.pop(), self.pop()
        if type(arguments) is not tuple or not callable(function):  # only what _NAMES has is
            raise TypeError
        self.push(function(*arguments))

    def set_attributes(self, _: None) -> None:
        """Ignore attributes of a dictionary, which weights do not need."""
        self.pop()
        if type(self.values[-1]) is not dict:
            raise TypeError

    def append(self, _: None) -> None:
        self._extend([self.pop()])

    def extend(self, _: None) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self.values[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def set_item(self, _: None) -> None:
        value, key = self.pop(), self.pop()
        self._set_items([key, value])

    def set_items(self, _: None) -> None:
        self._set_items(self._since_mark())

    def _set_items(self, values: list[Any]) -> None:
        target = self.values[-1]
        if type(target) is not dict or len(values) % 2:
            raise TypeError
        for key in values[::2]:
            if type(key) is not str:
                raise ValueError(f"its pickle has a dictionary with a key of type {type(key).__name__}, must be a string")
        target.update(zip(values[::2], values[1::2], strict=True))


def _ignore(stack: _Stack, argument: int) -> None:
    """The number of a protocol, or the size of a frame, which is there to read ahead."""


_OPERATIONS: Mapping[str, Callable[[_Stack, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _ignore),
    **dict.fromkeys(("NONE", "BININT", "BININT1", "BININT2", "BINFLOAT"), _Stack.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _Stack.text),
    "LONG1": _Stack.integer,
    "NEWTRUE": lambda stack, _: stack.push(True),
    "NEWFALSE": lambda stack, _: stack.push(False),
    "EMPTY_TUPLE": lambda stack, _: stack.push(()),
    "EMPTY_LIST": lambda stack, _: stack.push([]),
    "EMPTY_DICT": lambda stack, _: stack.push({}),
    "MARK": _Stack.mark,
    "TUPLE": _Stack.marked_tuple,
    "TUPLE1": lambda stack, _: stack.tuple_of(1),
    "TUPLE2": lambda stack, _: stack.tuple_of(2),
    "TUPLE3": lambda stack, _: stack.tuple_of(3),
    "APPEND": _Stack.append,
    "APPENDS": _Stack.extend,
    "SETITEM": _Stack.set_item,
    "SETITEMS": _Stack.set_items,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Stack.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Stack.get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Stack.named),
    "BINPERSID": _Stack.storage,
    "REDUCE": _Stack.call,
    "BUILD": _Stack.set_attributes,
}
"""By pickletools' names, which are Python's."""
