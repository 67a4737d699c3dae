"""Reading YAML, with an error for keys that occur twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that equal keys in a mapping are an error; PyYAML would keep the last one."""

    # Checked while composing: later, a mapping also has the keys that `<<` merged into it, which it may replace.
    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for i, (_, name) in enumerate(keys):
            if keys[i] in keys[:i]:
                raise yaml.MarkedYAMLError(
                    problem=f"key {name!r} occurs twice", problem_mark=node.value[i][0].start_mark
                )
        return node


def read_yaml(path: str | Path) -> Any:
    """Return the content of a YAML file, see `parse_yaml`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not YAML, or a mapping has a key twice.

    >>> _ = Path("example.yaml").write_text("a: {b: [1, 2]}")
    >>> read_yaml("example.yaml")
    {'a': {'b': [1, 2]}}
    """
    return parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))


def parse_yaml(text: str, name: str = "the text") -> Any:
    """Return the content of a YAML text, ``{}`` for an empty one. PyYAML's safe loader reads it: plain data only.

    Args:
        text: YAML.
        name: of the text in error messages.

    Raises:
        ValueError: if the text is not YAML, or a mapping has a key twice.

    >>> parse_yaml("a: 1")
    {'a': 1}
    """
    try:
        # The loader derives from SafeLoader: tags that run Python code raise.
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    return {} if content is None else content
