"""Settings of Sphinx. ``sphinx-build -W --keep-going -b html docs docs/_build/html`` builds the site."""

import argparse
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

from flax import nnx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import signature, stringify_signature

sys.path.insert(0, str(Path(__file__).parent))

from inventory import write_inventories

import jax_te
from jax_te.cli.parser import COMMANDS, build_parser

project = "jax_te"
release = jax_te.__version__
extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "jax_te"
html_show_copyright = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

napoleon_numpy_docstring = False
napoleon_use_param = False
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "DTypeLike", "Initializer", "Key", "LogicalAxes", "PyTree")}
autodoc_preserve_defaults = True
maximum_signature_line_length = 1  # an argument on each line
intersphinx_mapping = write_inventories(Path(__file__).parent / "inventories", Path(__file__).parent / "_build")
autosummary_generate = False  # the pages of names are written below
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

PARTS = (
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
)
HOMES: dict[str, str] = {}
"""The module of the page of each public name, by which a docstring may refer to it."""
for part in PARTS:
    for public in importlib.import_module(f"jax_te.{part}").__all__:
        HOMES.setdefault(public, f"jax_te.{part}")


def write_api_pages() -> None:
    """Write a page for each module, with a line for each of its names, and a page for each name.

    A name that two modules offer has one page, of the first: Sphinx allows one description of an object.
    """
    folder = Path(__file__).parent / "api"
    index = ["# Every public name", "", "The names of each module, with what they are for.", ""]
    for part in PARTS:
        module = importlib.import_module(f"jax_te.{part}")
        homes = {name: home_of(name, module) for name in module.__all__}
        names = folder / part.replace(".", "_")
        names.mkdir(exist_ok=True)
        for old in names.glob("*.md"):
            if homes.get(old.stem) != module.__name__:
                old.unlink()
        own = [name for name, home in homes.items() if home == module.__name__]
        for name in own:
            target = f"{module.__name__}.{name}"
            value = getattr(module, name)
            directive = "data"  # constants and aliases of types
            if inspect.isclass(value) or inspect.isfunction(value):
                directive = "class" if inspect.isclass(value) else "function"
            # An orphan, for the page of its module links to it: in the toctree it would be in every page's sidebar.
            head = f"---\norphan: true\n---\n\n# {name}\n\n[{module.__name__}](../{names.name}.md)\n"
            write_page(names / f"{name}.md", f"{head}\n```{{eval-rst}}\n.. auto{directive}:: {target}\n```\n")
        summary = "\n".join(f"   {name if name in own else f'{home}.{name}'}" for name, home in homes.items())
        write_page(
            folder / f"{names.name}.md",
            f"# {module.__name__}\n\n```{{eval-rst}}\n.. automodule:: {module.__name__}\n   :no-members:\n\n"
            f".. autosummary::\n   :nosignatures:\n\n{summary}\n```\n",
        )
        index += [f"## {module.__name__}", "", "```{eval-rst}", f".. currentmodule:: {module.__name__}", ""]
        index += [".. autosummary::", "   :nosignatures:", "", summary, "```", ""]
    write_page(folder / "names.md", "\n".join(index))


def home_of(name: str, module: ModuleType) -> str:
    """Return the module of a name's page: another one, if that offers the same object."""
    home = HOMES[name]
    same = getattr(importlib.import_module(home), name) is getattr(module, name)
    return home if same else module.__name__


def write_page(path: Path, text: str) -> None:
    """Write a page unless it is there as it should be, for Sphinx reads again what is newer."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_command_pages() -> None:
    """Write a page for each command of ``jax-te`` from its parser, with what its examples print.

    The later half of a long list of options has a page of its own.
    """
    folder = Path(__file__).parent / "commands"
    names = {name: name.replace(" ", "_") for name in COMMANDS}
    for name, page in names.items():
        parser = parser_of(name.split())
        text = [f"# jax-te {name}", "", *blocks(parser.description or ""), f"    {parser.format_usage().strip()}", ""]
        transcript = folder / f"{page}.txt"
        if transcript.exists():
            text += ["## Examples", "", "```text", transcript.read_text().rstrip(), "```", ""]
        groups = [group for group in parser._action_groups if group._group_actions]
        first = len(groups) if sum(len(group._group_actions) for group in groups) <= 40 else (len(groups) + 1) // 2
        text += option_lists(groups[:first])
        if parser.epilog:
            text += ["```text", parser.epilog, "```", ""]
        if later := groups[first:]:
            titles = ", ".join((group.title or "").lower() for group in later)
            text += [f"[More options]({page}_more.md): {titles}.", ""]
            text += ["```{toctree}", ":hidden:", f"{page}_more", "```", ""]
            head = [f"# jax-te {name}: {titles}", "", f"[jax-te {name}]({page}.md) has the other options.", ""]
            write_page(folder / f"{page}_more.md", "\n".join([*head, *option_lists(later)]))
        write_page(folder / f"{page}.md", "\n".join(text))


def option_lists(groups: list[argparse._ArgumentGroup]) -> list[str]:
    """Return a list of options for each group, under its title."""
    text = []
    for group in groups:
        title = (group.title or "Options").capitalize()
        text += [f"## {title}", "", *map(option_line, group._group_actions), ""]
    return text


def write_error_index() -> None:
    """Write a page with the symptoms of the troubleshooting pages, in alphabetical order, and their remedies."""
    folder = Path(__file__).parent
    entry = re.compile(r"^### (.+?)\n.*?^\*Remedy\.\*\s+(.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
    pages = sorted(folder.glob("troubleshooting*.md"))
    found = [(*parts, page.name) for page in pages for parts in entry.findall(page.read_text())]
    text = ["# Errors and their remedies", ""]
    text += ["Messages and symptoms in alphabetical order. Each leads to its cause.", ""]
    for symptom, remedy, page in sorted(found, key=lambda entry: entry[0].strip("`…").lower()):
        slug = re.sub(r"[^\w\- ]", "", symptom.lower()).replace(" ", "-")
        line = f"- [{symptom}]({page}#{slug}): {' '.join(remedy.split())}"
        text += [
            textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False),
            "",
        ]
    write_page(folder / "errors.md", "\n".join(text))


def parser_of(path: list[str]) -> argparse.ArgumentParser:
    """Return the parser of a command, such as ``["bench", "layer"]``."""
    parser = build_parser()
    for part in path:
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = commands.choices[part]
    return parser


def blocks(text: str) -> list[str]:
    """Return paragraphs of a help text as those of a page; what is indented there stays as it is."""
    lines = []
    for paragraph in text.split("\n\n"):
        if re.search("^  ", paragraph, re.MULTILINE):
            lines += ["```text", paragraph, "```", ""]
        else:
            lines += [escaped(paragraph), ""]
    return lines


def option_line(action: argparse.Action) -> str:
    """Return an item of a list: the option with its value, its help and its choices."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    value = " ".join(value) if isinstance(value, tuple) else value
    names = ", ".join(action.option_strings) or value
    shown = f"{names} {value}" if action.option_strings and value and action.nargs != 0 else names
    text = (action.help or "") % {**vars(action), "prog": "jax-te"}
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    line = f"- `{shown}`: {escaped(' '.join(text.split()))}{'.' if choices else ''}{escaped(choices)}"
    return textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def escaped(text: str) -> str:
    """Return text in which no character is Markdown's or HTML's."""
    return re.sub(r"([*_<>\[\]`{}$|])", r"\\\1", text)


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
    arguments = re.sub(
        r"(?:~typing\.)?Annotated\[(.+?), (?:Words|\w+)\(.*?\)\]", r"\1", arguments
    )  # what checks say about a type
    arguments = re.sub(r"<class 'jax\.numpy\.(\w+)'>", r"jnp.\1", arguments)
    # Linen's layers have the names of NNX's ones, and annotations without a module.
    layers = importlib.import_module("jax_te.linen").__all__ if name.startswith("jax_te.linen.") else ()
    for layer in layers:
        arguments = re.sub(rf"(?<![\w.])(?={layer}\b)", "~jax_te.linen.", arguments)
    return arguments, returned or None


def join_wrapped_names(app, what, name, obj, options, lines):
    """One line for a list of arguments that share a description, which napoleon reads line by line."""
    text = re.sub(r"^( +)((?:\w+, )*\w+,)\n +(?=\w+(?:, \w+)*[,:])", r"\1\2 ", "\n".join(lines), flags=re.MULTILINE)
    lines[:] = text.splitlines()


def let_names_wrap(body):
    """Return a page whose lines may end inside a dotted name, a path or a call, so that they fit a narrow screen."""
    name = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
    ends = re.compile(r"[./(:=](?=\w)|(?<=[A-Za-z0-9])(?<!jax)_(?=\w)")

    def divide(found):
        parts = ends.sub(lambda end: f"{end[0]}\n", found[0])
        # The longest names in capitals, too: they alone would make a column of a table as wide as they are.
        parts = re.sub(r"[A-Za-z0-9]{20,}", lambda word: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "\n", word[0]), parts)
        return parts.replace("\n", '</span><wbr><span class="pre">')

    return name.sub(divide, body)


def make_reachable(app, pagename, templatename, context, doctree):
    """Let the keyboard reach code and tables that scroll sideways, and take out links that lead nowhere."""
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    body = re.sub(r'<div class="table-wrapper', r'<div tabindex="0" class="table-wrapper', body)
    if pagename.startswith(("parity", "from_megatron", "replicas")):  # with tables of long names
        body = let_names_wrap(body)
    if pagename.startswith("_modules/"):
        # Code that two pages describe, as of a layer in NNX and Linen, has one link back, with the other one's anchor.
        body = re.sub(r'<a class="viewcode-back".*?</a>', "", body)
        body = re.sub(r'<li><a href="builtins\.html">.*?</li>', "", body)  # constants, without source
    context["body"] = body


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
    write_api_pages()
    write_command_pages()
    write_error_index()
    app.connect("missing-reference", find_public_name)
    app.connect("autodoc-process-signature", write_signature)
    app.connect("html-page-context", make_reachable, priority=900)  # after the theme has wrapped tables
    app.connect("autodoc-process-docstring", join_wrapped_names, priority=400)  # before napoleon's
