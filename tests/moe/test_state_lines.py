"""Each line that carries the state of routers and experts on is needed: without it a test fails.

The package is copied, one line of the copy is changed as if it had been forgotten, and the test runs there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS, LAYER, RECIPES = "tests/training/test_experts.py", "tests/moe/test_layer.py", "tests/moe/test_recipes.py"
ONE, PIPELINE = "tests/moe/test_one_expert.py", "tests/moe/test_pipeline.py"


class Forgotten(NamedTuple):
    """A line of a file, what is left of it, and the test that notices: a file of tests and pytest's ``-k``."""

    file: str
    line: str
    left: str
    tests: str
    named: str


ROUTER, RULES = "layers/moe/router.py", "layers/moe/router_state.py"
STATE, COUNTING = "quantize/state.py", "quantize/counting.py"
COUNTED = "(self.expert_bias, self.quantile_bias, self.counts_so_far, self.last_step)"
LINES = [
    # What a call counts.
    Forgotten(
        ROUTER,
        "probs = self._with_counts(probs, logits, chosen.experts, kept, token_mask, found, so_far)",
        "pass",
        STEPS,
        "goes_on_once and 1",
    ),
    Forgotten(ROUTER, COUNTED, COUNTED.replace("self.expert_bias", "None"), STEPS, "goes_on_once and 1"),
    Forgotten(ROUTER, COUNTED, COUNTED.replace("self.quantile_bias", "None"), STEPS, "quantiles"),
    Forgotten(ROUTER, COUNTED, COUNTED.replace("self.counts_so_far", "None"), STEPS, "later_microbatches"),
    Forgotten(ROUTER, COUNTED, COUNTED.replace("self.last_step", "None"), STEPS, "test_metrics"),
    Forgotten(
        COUNTING, "return g, counts, None", "return g, [0.0 * number for number in counts], None", STEPS, "quantiles"
    ),
    # What a call reads.
    Forgotten(
        ROUTER,
        "bias = self.expert_bias.get_value() if self.expert_bias is not None else None",
        "bias = None",
        LAYER,
        "oracle and 9-",
    ),
    Forgotten(ROUTER, "- bias[None], options.topk", ", options.topk", LAYER, "oracle and 31-"),
    Forgotten(
        ROUTER,
        "earlier = self.counts_so_far.get_value()",
        "earlier = 0.0 * self.counts_so_far.get_value()",
        LAYER,
        "oracle and 18-",
    ),
    # How a state goes on.
    Forgotten(
        RULES,
        "return old + self.rate * jnp.sign(jnp.mean(total, axis=-1, keepdims=True) - total)",
        "return old",
        STEPS,
        "goes_on_once and 1",
    ),
    Forgotten(RULES, "return jnp.where(calls > 0.0, new, old)", "return old", STEPS, "quantiles"),
    Forgotten(RULES, "return old + total", "return old", STEPS, "later_microbatches"),
    Forgotten(RULES, "within_step: ClassVar[bool] = True", "", STEPS, "later_microbatches"),
    Forgotten(RULES, "return jnp.zeros_like(old)", "return total", STEPS, "later_microbatches"),
    Forgotten(RULES, "        return total\n", "        return old\n", STEPS, "test_metrics"),
    Forgotten(
        STATE,
        "value = entry.rule.advance(entry.old, entry.gradient)",
        "value = entry.old",
        STEPS,
        "goes_on_once and 1",
    ),
    Forgotten(
        STATE,
        "return value if keep_old is None else jnp.where(keep_old, entry.old, value)",
        "return value",
        STEPS,
        "skipped_step",
    ),
    Forgotten(
        STATE,
        "combined = max_or_nan if counting_of(node) is None else jnp.sum",
        "combined = max_or_nan",
        STEPS,
        "goes_on_once and 2",
    ),
    # From one microbatch to the next.
    Forgotten(
        "training/microbatches.py",
        "return with_counts(of_step, self.counts)",
        "return of_step",
        STEPS,
        "later_microbatches",
    ),
    Forgotten(
        "training/microbatches.py",
        "return MicrobatchStart(rest, added_counts(self.counts, quantizer_gradients))",
        "return MicrobatchStart(rest, self.counts)",
        STEPS,
        "later_microbatches",
    ),
    Forgotten(
        COUNTING,
        "total.replace(total.get_value() + found[path].get_value())",
        "total",
        STEPS,
        "later_microbatches",
    ),
    Forgotten(
        COUNTING,
        "return variable.replace(counting_of(variable).so_far(variable.get_value(), counts[path].get_value()))",
        "return variable",
        STEPS,
        "later_microbatches",
    ),
    # Through the stages of a pipeline.
    Forgotten(
        "training/pipeline/sums.py",
        "merged = _merged(states[path].replace(all_chunks[task.chunk]), state, task.counts)",
        "merged = all_chunks[task.chunk]",
        PIPELINE,
        "1f1b",
    ),
    Forgotten(
        "training/pipeline/sums.py",
        "states[path] = states[path].replace(_merged(states[path], state, counts))",
        "pass",
        PIPELINE,
        "1f1b",
    ),
    # Delayed scaling of each expert.
    Forgotten("ops/moe/grouped_dense.py", '"x", rows, weights.state', '"x", rows, None', RECIPES, "HYBRID"),
    Forgotten("ops/moe/grouped_dense.py", '"grad", rows, saved.state', '"grad", rows, None', RECIPES, "HYBRID"),
    Forgotten(
        "quantize/quantizer.py",
        "self.scale_for(amaxes, scale)[",
        "self.scale_for(amaxes, 0 * scale + 1)[",
        RECIPES,
        "HYBRID",
    ),
    Forgotten(
        "quantize/quantizer.py",
        "return quantized, amaxes\n",
        "return quantized, 0 * amaxes\n",
        RECIPES,
        "histories and max",
    ),
    Forgotten(
        "layers/quantizable.py",
        "return init_gemm_state(recipe, groups=self.groups)",
        "return init_gemm_state(recipe)",
        ONE,
        "delayed",
    ),
    Forgotten("layers/moe/grouped_linear.py", "state=weights.state,", "", ONE, "delayed"),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of the package alone, with the tests of this one."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "jax_te", root / "jax_te", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("__pycache__", "stored"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def outcome(root: Path, tests: str, named: str) -> tuple[int, str]:
    """Status of a run of tests in a checkout, and what it printed."""
    # Python takes a file of the same second and size for the one that it compiled.
    search = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": search, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        tests,
        "-k",
        named,
    ]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return run.returncode, run.stdout


@pytest.mark.parametrize("row", LINES, ids=[f"{number}-{Path(row.file).stem}" for number, row in enumerate(LINES)])
def test_a_line_is_once_in_its_file(row: Forgotten) -> None:
    assert (ROOT / "jax_te" / row.file).read_text().count(row.line) == 1, f"write the row for today's code: {row.line}"


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "named"), sorted({(row.tests, row.named) for row in LINES}))
def test_with_all_lines_the_tests_pass(copied: Path, tests: str, named: str) -> None:
    status, printed = outcome(copied, tests, named)
    assert status == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize("row", LINES, ids=[f"{number}-{Path(row.file).stem}" for number, row in enumerate(LINES)])
def test_without_a_line_a_test_fails(copied: Path, row: Forgotten) -> None:
    path = copied / "jax_te" / row.file
    text = path.read_text()
    path.write_text(text.replace(row.line, row.left))
    try:
        status, printed = outcome(copied, row.tests, row.named)
    finally:
        path.write_text(text)
    assert status == 1, printed  # pytest's for failed tests; others are for runs that did not come to them
    assert " failed" in printed, printed  # 1 is Python's, too, where pytest is not there
