"""Rewrites keywords of JSON schemas that llguidance lacks into those that it has, or refuses them by name and place.

What is rewritten matches the same values, but for numbers that lie next to an excluded one (`complement._STEP`).
"""

from typing import Any

from jaxllm.errors import GrammarError
from jaxllm.structured.complement import Complements, all_of, any_of, kinds_of
from jaxllm.structured.json_schema import escaped, walk, with_parts
from jaxllm.structured.property_names import names_of

_REWRITTEN = ("not", "propertyNames", "if", "then", "else", "dependentRequired", "dependentSchemas")
_REFUSED: dict[str, Any] = {
    "contains": None,
    "uniqueItems": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "dependencies": {},
    "$dynamicRef": None,
    "$recursiveRef": None,
}
"""Each with the value that says nothing."""
_IDLE = ("minContains", "maxContains")
"""Keywords that say nothing without a refused one."""
_LATER = ("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef")
"""Keywords that drafts up to 07 do not know: there they say nothing."""


def supported(schema: Any) -> Any:
    """A schema of the same values without keywords that llguidance lacks. Raises GrammarError with a JSON pointer."""

    def rewrite(node: Any, pointer: str) -> Any:
        if not isinstance(node, dict):
            return node
        kept = {}
        for key, value in node.items():
            if key in _REFUSED and key not in unknown and value != _REFUSED[key]:
                raise GrammarError(f"at {pointer}/{escaped(key)}: {key} is not supported; leave it out")
            if key not in (*_REWRITTEN, *_REFUSED, *_IDLE):
                kept[key] = value
        shared = {key: kept.pop(key) for key in ("$defs", "definitions") if key in kept}
        result = with_parts(kept, pointer, rewrite)
        for key, definitions in shared.items():
            places = {name: f"{pointer}/{key}/{escaped(name)}" for name in definitions}
            result[key] = {
                name: rewrite(definitions[name], at) if is_used(at) else definitions[name] for name, at in places.items()
            }
        added = [part for part in parts_of(node, pointer) if part is not True]
        return {**result, "allOf": [*result.get("allOf", ()), *added]} if added else result

    def is_used(place: str) -> bool:
        return any(f"{reference}/".startswith(f"{place}/") for reference in references)

    def parts_of(node: dict[str, Any], pointer: str) -> list[Any]:
        """Schemas that replace rewritten keywords of a node."""
        parts = []
        if "not" in node:
            parts.append(complements.of(node["not"], f"{pointer}/not", kinds_of(node)))
        if "propertyNames" in node and "object" in kinds_of(node):
            parts.append(names_of(schema, node["propertyNames"], f"{pointer}/propertyNames").schema)
        if "if" in node and ("then" in node or "else" in node):
            yes = [rewrite(node[key], f"{pointer}/{key}") for key in ("if", "then") if key in node]
            no = [
                complements.of(node["if"], f"{pointer}/if", kinds_of(node)),
                rewrite(node.get("else", True), f"{pointer}/else"),
            ]
            parts.append(any_of([all_of(yes), all_of(no)]))
        for name, names in node.get("dependentRequired", {}).items():
            parts.append(_depends(name, {"required": [name, *names]}))
        for name, part in node.get("dependentSchemas", {}).items():
            there = rewrite(part, f"{pointer}/dependentSchemas/{escaped(name)}")
            parts.append(_depends(name, all_of([{"required": [name]}, there])))
        return parts

    draft = schema.get("$schema", "") if isinstance(schema, dict) else ""
    unknown = _LATER if "/draft-0" in draft else ()
    references = {node["$ref"] for _, node in walk(schema) if isinstance(node, dict) and "$ref" in node}
    complements = Complements(schema, rewrite)
    return rewrite(schema, "#")


def _depends(name: str, there: Any) -> Any:
    """Lacks a property, or else is as a schema says."""
    return any_of([{"properties": {name: False}, "additionalProperties": True}, there])
