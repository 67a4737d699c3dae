"""Settings of Sphinx. ``sphinx-build -W --keep-going -b html docs docs/_build/html`` builds the site."""

import importlib
import re
import sys

from flax import nnx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import signature, stringify_signature

import jax_te

project = "jax_te"
release = jax_te.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "jax_te"
html_show_copyright = False

myst_heading_anchors = 3

napoleon_numpy_docstring = False
napoleon_use_param = False
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "DTypeLike", "Initializer", "Key", "LogicalAxes", "PyTree")}
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    "member-order": "bysource",
    "show-inheritance": True,
    "no-value": True,
    "exclude-members": "nnx_class, params_dtype",  # class attributes that autodoc takes for documented ones
}

# Docstrings refer to names in single backticks. Some of those are arguments, which are not targets: a name that is not
# found stays text.
default_role = "py:obj"

PARTS = [
    *(
        "errors",
        "config",
        "recipe",
        "sharding",
        "remat",
        "random",
        "quantize",
        "ops",
        "layers",
        "megatron",
        "te_pytorch",
        "models",
        "checkpoint",
    ),
    *("interop.huggingface", "interop.torch", "interop.megatron", "training", "training.pipeline", "data"),
    *("metrics", "linen"),
]
HOMES: dict[str, str] = {}
for part in PARTS:
    for public in importlib.import_module(f"jax_te.{part}").__all__:
        HOMES.setdefault(public, f"jax_te.{part}")


def find_public_name(app, env, node, contnode):
    """Link what docstrings give without its module, or annotations with the module that defines it."""
    if node.get("refdomain") != "py":
        return None
    path = node["reftarget"].split(".")
    while path and path[0] not in HOMES:
        path.pop(0)
    if not path:
        return None
    target = ".".join([HOMES[path[0]], *path])
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], target, node, contnode
    )


def write_signature(app, what, name, obj, options, arguments, returned):
    """As in the source: an NNX module's arguments (its metaclass takes ``*args, **kwargs``), and names of types."""
    if what == "class" and issubclass(obj, nnx.Module):
        found = signature(obj.__init__, bound_method=True, type_aliases=app.config.autodoc_type_aliases)
        arguments = stringify_signature(found, unqualified_typehints=True)
    if arguments is None:
        return None
    arguments, returned = (
        re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text or "") for text in (arguments, returned)
    )
    return re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", arguments), returned or None


def join_wrapped_names(app, what, name, obj, options, lines):
    """One line for a list of arguments that share a description, which napoleon reads line by line."""
    text = re.sub(r"^( +)((?:\w+, )*\w+,)\n +(?=\w+(?:, \w+)*[,:])", r"\1\2 ", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.splitlines()


def find_constants():
    """Give packages the docstrings below constants, which autodoc looks for only where it finds the name."""
    for name, home in HOMES.items():
        for module in [module for module in sys.modules if module.startswith(f"{home}.")]:
            docs = ModuleAnalyzer.for_module(module).find_attr_docs()
            if ("", name) in docs:
                package = ModuleAnalyzer.for_module(home)
                package.find_attr_docs()
                package.attr_docs["", name] = docs["", name]


def setup(app):
    find_constants()
    app.connect("missing-reference", find_public_name)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("autodoc-process-docstring", join_wrapped_names, priority=400)  # before napoleon's
