"""The letters by which byte-level vocabularies spell bytes: printable Latin-1 itself, the rest from U+0100 in order. Source: GPT-2."""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
LETTERS: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + n) for n, byte in enumerate(_OTHERS)}
BYTES: dict[str, int] = {letter: byte for byte, letter in LETTERS.items()}
