"""``jax-te inspect recipes``: the recipe of every layer of a run, with the reason."""

from __future__ import annotations

from jax_te._text import table
from jax_te.cli.build import abstract_model, contexts
from jax_te.cli.inspect.options import InspectRecipes
from jax_te.cli.inspect.report import print_json, print_rules, rules_values
from jax_te.cli.inspect.trained import run_and_recipe
from jax_te.cli.module_recipes import layer_recipes, recipe_label
from jax_te.cli.precision_rules import apply_rules, quantization_rules, read_rules
from jax_te.recipe import autocast


def run(options: InspectRecipes) -> int:
    """Return the exit status, 0, once the recipes are printed.

    Raises:
        ValueError: for a folder without a run, and rules that cannot be used.
    """
    config, recipe = run_and_recipe(options)
    file = options.precision_config
    rules = config.precision_config if file is None else read_rules(file)  # a run keeps the text of its file
    with contexts(config), autocast(recipe):
        model = abstract_model(config)
        report = None if rules is None else apply_rules(model, quantization_rules(rules, options.factory_modules))
        layers = layer_recipes(model)
    rows = [(r.module, r.kind, recipe_label(r.training), recipe_label(r.evaluation), r.why) for r in layers]
    if options.json:
        names = ("module", "kind", "training", "evaluation", "why")
        modules = [dict(zip(names, row, strict=True)) for row in rows]
        print_json(recipe, {"modules": modules} | rules_values(report))
        return 0
    print_rules(report)
    print(table(("module", "class", "training", "evaluation", "why"), rows))
    return 0
