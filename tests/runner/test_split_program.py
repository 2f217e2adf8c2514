"""Layers are compiled in groups that recur."""

from types import SimpleNamespace

import pytest

from jaxllm.runner import split_program


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("aaaaaaaaaaaa", ["aaaaa", "aaaaa", "aa"]),
        ("aaaaaaaaab", ["aaaaa", "aaaab"]),
        ("daaaaaaaaaaa", ["d", "aaaaa", "aaaaa", "a"]),
        ("ababababab", ["abab", "abab", "ab"]),
        ("aaaaabaaaaabaaaaab", ["aaaaab", "aaaaab", "aaaaab"]),
        ("ab", ["ab"]),
        ("a", ["a"]),
    ],
)
def test_groups_of_layers(kinds, groups):
    layers = [SimpleNamespace(params={"jaxpr": kind}) for kind in kinds]
    found = ["".join(layer.params["jaxpr"] for layer in group) for group in split_program._groups(layers)]
    assert found == groups
