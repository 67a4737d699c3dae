"""Lines of Python in a lowered program: those of the user, of layers and of operations."""

import re

import jax
import jax.numpy as jnp
import optax

from jax_te.layers import Linear
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.training import create_train_state, make_train_step


def test_operations_have_lines_of_the_user_and_of_layers_and_none_that_pass_calls_on():
    tx = optax.sgd(0.1)
    state = create_train_state(
        lambda rngs: Linear(16, 16, params_dtype=jnp.bfloat16, rngs=rngs), tx, key=jax.random.key(0)
    )
    step = make_train_step(lambda model, x, key: jnp.mean(model(x)), tx)
    with autocast(Float8CurrentScaling()):
        program = step.lower(state, jnp.ones((16, 16))).as_text(debug_info=True)
    files = set(re.findall(r'"[^"]*/((?:jax_te|tests)/[^"]*\.py)"', program))
    assert {"tests/training/test_source_lines.py", "jax_te/layers/linear.py"} <= files
    assert any(name.startswith("jax_te/ops/xla/") for name in files)
    # The norm of the gradients and the rounding of parameters are the train step's own operations.
    assert {"jax_te/training/outcome.py", "jax_te/training/masters.py"} <= files
    passing_on = (
        "_validation/",
        "training/differentiation.py",
        "remat/",
        "ops/sharded_vjp.py",
        "ops/linear/resolve.py",
    )
    assert not [name for name in files if name.removeprefix("jax_te/").startswith(passing_on)]
