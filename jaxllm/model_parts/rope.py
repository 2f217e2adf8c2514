"""How tokens' positions turn queries and keys."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. Which fields count depends on `kind`; the names are Hugging Face's."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    """Context of the pretraining; set for every kind but default, linear and proportional."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor of cosine and sine."""
    divisors: tuple[float, ...] = ()
    """Longrope's divisor of each frequency."""
    num_turning: int | None = None
    """Number of the first frequencies, which alone are not 0, in the proportional kind."""
    rotary_dim: int | None = None
    """Leading values of a head that are rotated; None: all."""
    interleaved: bool = False
    """Whether value 2 i of a head turns with value 2 i + 1, instead of value i with the one half a head behind it."""
    sections: tuple[int, int, int] | None = None
    """How many frequencies turn by the position in time, by the row and by the column; None: all turn by the position in the sequence."""
    sections_interleaved: bool = False
    """Whether frequencies of the three alternate, as far as rows and columns have some, instead of lying one after the other."""
