"""Which forwards of transformers' modules this package may stand in for: those whose source it knows.

A module's class says little (subclasses, remote code, the next version), so its forward's source is compared with what
the supported versions have, comments and formatting aside. One that isn't known is left alone.
"""

import ast
import hashlib
import inspect
import textwrap
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import activations

NOT_MEANING = {"ctx", "kind", "type_comment", "type_params", "annotation", "returns", "decorator_list"}

# Fingerprints in transformers 5.15 to 5.24; DeepSeek-V2 and V3, GLM-4-MoE-Lite and Youtu share all but the last ones.
KNOWN = {
    "26fe9d185809395e": "norm",
    "2914d298c011cbe2": "mlp",
    "1d9e58de8a0a985f": "router, softmax",
    "88e9ce5b5a38d78a": "router, sigmoid",
    "d9ca53976579bce3": "mixture",
    "d2841b378f3e5b65": "layer",
    "97629c7d846581ec": "attention, complex rope",  # up to 5.23
    "b9549df8fd785804": "attention, complex rope",
    "581a4048d0c69cf0": "attention, real rope",  # up to 5.23
    "f3b2d1af937093a6": "attention, real rope",
}


def _tree(node: Any) -> Any:
    """A syntax tree as nested tuples, the same in every Python version."""
    if isinstance(node, ast.AST):
        fields = ((name, _tree(value)) for name, value in ast.iter_fields(node) if name not in NOT_MEANING)
        return type(node).__name__, *((name, value) for name, value in fields if value not in (None, ()))
    return tuple(_tree(item) for item in node) if isinstance(node, list) else node


@lru_cache
def fingerprint(function: Any) -> str | None:
    """Of a function's body, its docstring aside, or None where its source isn't at hand.

    `past_key_values` counts as `cache`: 5.24 renamed it.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        definition = ast.parse(source.replace("past_key_values", "cache")).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return hashlib.sha256(repr([_tree(statement) for statement in body]).encode()).hexdigest()[:16]


def kind_of(module: nn.Module) -> str | None:
    """What a module's forward is known as, a value of `KNOWN`, or None."""
    if not type(module).__module__.startswith("transformers."):
        return None
    found = fingerprint(type(module).forward)
    return None if found is None else KNOWN.get(found)


def is_silu(activation: Any) -> bool:
    """Whether an activation is SiLU, as a module of torch's or transformers' or as a function."""
    return activation is nn.functional.silu or type(activation) in (nn.SiLU, activations.SiLUActivation)
