"""Reading of YAML within limits, with an error for duplicate keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from jax_te._validation import brief, read_text

MAX_CHARACTERS = 2**18
"""Maximum size of a YAML text, which PyYAML reads in some seconds. Rules for 1,000 layers take half of it."""

MAX_DEPTH, MAX_VALUES = 50, 100_000
"""Maximum nesting of the content, and maximum number of values, with aliases expanded."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that equal keys in a mapping are an error; PyYAML would keep the last one."""

    # Checked while composing: later, a mapping also has the keys that `<<` merged into it, which it may replace.
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"key {brief(key.value)} occurs twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node

    # Before values are built: an alias or a merge key in one node could expand to a billion values.
    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _check_nesting(node)
        return node


def _check_nesting(root: yaml.Node) -> None:
    waiting, seen = [(root, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_VALUES:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep, or stands for over {MAX_VALUES} values")
        if isinstance(node, yaml.MappingNode):
            waiting += [(child, depth + 1) for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(child, depth + 1) for child in node.value]


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file, see `parse_yaml`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is too large or not UTF-8, and see `parse_yaml`.

    >>> _ = Path("example.yaml").write_text("a: {b: [1, 2]}")
    >>> read_yaml("example.yaml")
    {'a': {'b': [1, 2]}}
    """
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, name: str = "the text") -> Any:
    """Return the content of a YAML text, ``{}`` for an empty one. PyYAML's safe loader reads it: plain data only.

    Args:
        text: text of the YAML file.
        name: name of the text in error messages.

    Raises:
        ValueError: if the text is not YAML, a mapping has a key twice, or the content is nested too deeply or expands
            to too many values; the message names the text.

    >>> parse_yaml("a: 1")
    {'a': 1}
    """
    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"it has more than {MAX_CHARACTERS} characters")
        # The loader derives from SafeLoader: tags that run Python code raise.
        content = yaml.load(text, Loader=_Loader)
    except RecursionError:
        problem = "it is nested too deeply"
    except (AttributeError, LookupError):  # raised by PyYAML for `!!timestamp foo` and `!!bool foo`
        problem = "a value does not fit its tag"
    except (yaml.YAMLError, ArithmeticError, TypeError, ValueError) as error:
        problem = str(error)[:500]
    else:
        return {} if content is None else content
    raise ValueError(f"{name} cannot be read: {problem}")
