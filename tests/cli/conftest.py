"""Most of a micro run is compilation, and many tests start the same one: they share what XLA compiled."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="package", autouse=True)
def shared_compilations(tmp_path_factory):
    """A compilation cache for this folder's tests and the processes they start."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compilations")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="package")
def trained(tmp_path_factory, shared_compilations):
    """The folder of a finished micro run; tests may not change it."""
    from jax_te.cli.main import main  # not above: pytest's options add checks to jax_te when it is imported
    from tests.cli.runs import MICRO

    output = tmp_path_factory.mktemp("runs") / "trained"
    assert main(["train", "--output", str(output), *MICRO]) == 0
    return output
