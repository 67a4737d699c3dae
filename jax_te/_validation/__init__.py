"""Checks of arguments, fields, files and optional packages, for all of the package. Not for users."""

from jax_te._validation.annotations import check_annotations, checked
from jax_te._validation.checks import (
    FLOAT_DTYPES,
    check_axes,
    check_bool,
    check_choice,
    check_float,
    check_leaves,
    check_number,
    check_positive,
    check_rate,
    check_seed,
    dtype_name,
    float_dtype,
)
from jax_te._validation.extras import install_command, require_extra, without_module
from jax_te._validation.files import brief, read_text
from jax_te._validation.kinds import has_shape_and_dtype, is_integer, kinds_of, literal_names
from jax_te._validation.log import log_hints, log_once
from jax_te._validation.undo import on_failure
from jax_te._validation.warn import warn_caller
