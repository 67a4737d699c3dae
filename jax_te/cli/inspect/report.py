"""Parts of reports that several of ``jax-te inspect`` print."""

from __future__ import annotations

import json
from typing import Any

from jax_te.megatron import QuantizationReport
from jax_te.recipe import Recipe


def print_rules(report: QuantizationReport | None) -> None:
    """Print the effect of a precision file's rules, if there are any."""
    if report is not None:
        print(f"{report}\n")


def rules_values(report: QuantizationReport | None) -> dict[str, Any]:
    """Return the effect of a precision file's rules as a JSON value."""
    if report is None:
        return {}
    rules = [{"module": m.path, "matcher": m.matcher, "config": m.config_key} for m in report.modules]
    idle = ("unused_matchers", "shadowed_matchers", "disabled_matchers", "unused_configs")
    return {"rules": rules} | {name: list(getattr(report, name)) for name in idle}


def print_json(recipe: Recipe | None, values: dict[str, Any]) -> None:
    """Print the recipe's name and other values as JSON."""
    print(json.dumps({"recipe": None if recipe is None else recipe.name} | values, indent=2))
