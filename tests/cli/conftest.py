"""A finished run that tests share."""

import pytest


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """The folder of a finished micro run; tests may not change it."""
    from jax_te.cli.main import main
    from tests.support.runs import MICRO

    output = tmp_path_factory.mktemp("runs") / "trained"
    assert main(["train", "--output", str(output), *MICRO]) == 0
    return output
