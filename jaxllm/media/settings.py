"""Reads how a checkpoint wants images prepared: preprocessor_config.json, or processor_config.json, under mm_processor_kwargs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from PIL import Image

from jaxllm.errors import ConfigError, shortened
from jaxllm.files import read_json

MAX_PIXELS = 2**31 - 1
_FIXED = {
    "do_resize": (True, None),
    "do_rescale": (True, None),
    "do_normalize": (True, None),
    "do_convert_rgb": (True, None),
    "do_center_crop": (False, None),
    "do_pan_and_scan": (False, None),
}
"""Keys that change what an encoder gets, with the values that are supported."""


def read_settings(directory: Path, kind: str = "image") -> dict[str, Any]:
    """The settings of images, or of videos, in a model directory. As in transformers, those inside of processor_config.json come first,
    and videos without settings of their own have those of images. Raises ConfigError."""
    if (path := directory / "processor_config.json").is_file():
        inner = _object(read_json(path), path).get(f"{kind}_processor")
        if inner is not None:
            return _object(inner, path)
    if kind == "video":
        if (path := directory / "video_preprocessor_config.json").is_file():
            return _object(read_json(path), path)
        return read_settings(directory)
    if (path := directory / "preprocessor_config.json").is_file():
        return _object(read_json(path), path)
    raise ConfigError(
        f"{directory} has no preprocessor_config.json, which says how images are prepared; copy it from where the model comes from"
    )


class Settings:
    """Checked values of the settings in a file, under those of mm_processor_kwargs. Wrong ones raise ConfigError."""

    def __init__(self, of_file: Mapping[str, Any], given: Mapping[str, Any], options: Sequence[str]):
        """`options`: the keys that mm_processor_kwargs, `given`, may have."""
        if unknown := [name for name in given if name not in options and name not in _FIXED]:
            raise ConfigError(
                f"mm_processor_kwargs has {', '.join(map(repr, unknown))}; of this model it takes {', '.join(options)}"
            )
        self._values = {**of_file, **given}
        if given.get("size") is not None:  # else an older spelling of the file would win
            self._values |= {name: given.get(name) for name in ("min_pixels", "max_pixels")}

    def fault(self, text: str) -> NoReturn:
        raise ConfigError(f"settings of images (preprocessor_config.json, mm_processor_kwargs): {text}")

    def integer(self, name: str, default: Any) -> int:
        """A positive integer, the default where it is null or absent."""
        return self._positive(name, default if (value := self._values.get(name)) is None else value)

    def number(self, name: str, default: float) -> float:
        """A positive number, the default where it is null or absent."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < MAX_PIXELS:
            self.fault(f"{name} is {shortened(repr(value))}, must be a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false, the default where it is null or absent."""
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            self.fault(f"{name} is {shortened(repr(value))}, must be true or false")
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether a value is there, and not null."""
        return self._values.get(name) is not None

    def sizes(self, name: str, *keys: str) -> Mapping[str, int]:
        """An object of positive integers with some of these keys; others may be null. Empty where it is null or absent."""
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fault(f"{name} is {shortened(repr(value))}, must be an object with {', '.join(keys)}")
        found = {key: size for key, size in value.items() if size is not None}
        if unknown := found.keys() - set(keys):
            self.fault(f"{name} has {', '.join(map(repr, sorted(unknown)))}, must have {', '.join(keys)}")
        return {key: self._positive(f"{name}.{key}", size) for key, size in found.items()}

    def resample(self, default: Image.Resampling) -> Image.Resampling:
        """The filter of resizing, by Pillow's number."""
        value = self._values.get("resample")
        if value is None:
            return default
        if type(value) is not int or value not in list(Image.Resampling):
            self.fault(
                f"resample is {shortened(repr(value))}, must be one of {', '.join(f'{r.value} ({r.name})' for r in Image.Resampling)}"
            )
        return Image.Resampling(value)

    def check(
        self,
        processors: Sequence[str],
        mean: Sequence[float],
        std: Sequence[float],
        sizes: Mapping[str, int],
        *,
        kind: str = "image",
    ) -> None:
        """Raise ConfigError if the settings ask for what is not computed, or contradict the model. sizes: those of config.json. kind: of
        what they prepare."""
        of = self._values.get(f"{kind}_processor_type")
        if of is not None and str(of).removesuffix("Fast").removesuffix("Pil") not in processors:
            self.fault(f"{kind}_processor_type is {shortened(repr(of))}, known for this model: {', '.join(processors)}")
        for name, allowed in _FIXED.items():
            if self._values.get(name) not in allowed:
                self.fault(f"{name} is {shortened(repr(self._values[name]))}, must be {allowed[0]}")
        for name, numbers in (("image_mean", mean), ("image_std", std), ("rescale_factor", (1 / 255,))):
            if (value := self._values.get(name)) is not None and not _are_equal(value, numbers):
                self.fault(f"{name} is {shortened(repr(value))}, must be {', '.join(map(str, numbers))}, as the encoder has it")
        for name, size in sizes.items():
            value = self._values.get(name)
            if isinstance(value, Mapping) and (sides := list(value.values())) and all(side == sides[0] for side in sides):
                value = sides[0]
            if value is not None and value != size:
                self.fault(f"{name} is {shortened(repr(value))}, but {size} in config.json")

    def _positive(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= MAX_PIXELS:
            self.fault(f"{name} is {shortened(repr(value))}, must be a positive integer up to {MAX_PIXELS}")
        return value


def _are_equal(value: Any, numbers: Sequence[float]) -> bool:
    """Whether a number or a list of them says the same as `numbers`."""
    given = value if isinstance(value, list | tuple) else [value] * len(numbers)
    if len(given) != len(numbers) or not all(type(number) in (int, float) and abs(number) < 1e9 for number in given):
        return False
    return all(math.isclose(one, other, abs_tol=1e-6) for one, other in zip(given, numbers, strict=True))


def _object(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is {shortened(repr(value))}, must be a JSON object")
    return value
