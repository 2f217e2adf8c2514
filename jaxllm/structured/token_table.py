"""The bridge from a tokenizer to llguidance: which bytes each token stands for, and which tokens end a text."""

from dataclasses import dataclass

from llguidance import LLParserLimits, LLTokenizer

from jaxllm.structured.structural_tag import Part


@dataclass(frozen=True)
class Vocabulary:
    """What llguidance has to know of a model's tokens."""

    tokenizer_json: str
    """The text of tokenizer.json."""
    num_columns: int
    """Of the model's logits; those beyond the tokenizer's tokens are never allowed."""
    eos_token_ids: tuple[int, ...]
    special_tokens: tuple[tuple[str, int], ...]
    """Texts that grammars write as one token."""

    def table(self) -> LLTokenizer:
        """llguidance's own form of it. Takes about a second for 128 000 tokens."""
        bare = LLTokenizer(self.tokenizer_json, slices=[])
        num_tokens = bare.vocab_size
        ends = [token for token in self.eos_token_ids if token < num_tokens]
        return LLTokenizer(self.tokenizer_json, n_vocab=max(self.num_columns, num_tokens), eos_token=ends or None)

    def split(self, text: str) -> list[Part]:
        """A text as runs of ordinary text and special tokens, the longest that fits first."""
        parts: list[Part] = []
        specials = sorted(self.special_tokens, key=lambda entry: -len(entry[0]))
        plain = 0
        place = 0
        while place < len(text):
            found = next(((name, token) for name, token in specials if text.startswith(name, place)), None)
            if found is None:
                place += 1
                continue
            if plain < place:
                parts.append(Part(text[plain:place]))
            parts.append(Part(*found))
            plain = place = place + len(found[0])
        if plain < len(text):
            parts.append(Part(text[plain:]))
        return parts


def parser_limits() -> LLParserLimits:
    """What one grammar may take, the same where it is tried and where it is used."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
