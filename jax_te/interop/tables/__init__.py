"""What checkpoints of Hugging Face and of Megatron-LM share: tables of tensors and of fields, and their two directions.

Not for users.
"""

from jax_te.interop.tables.fields import REQUIRED, Fields
from jax_te.interop.tables.form import TIED, Architecture, Form, KnownModel, Options, layer_windows, model_options
from jax_te.interop.tables.host_arrays import on_host, write_by_the_first
from jax_te.interop.tables.load import OnProgress, entry_reader, load_tensors, release_after_each
from jax_te.interop.tables.patterns import (
    Entry,
    Index,
    Pattern,
    Sizes,
    Table,
    converted,
    is_state,
    layer_rows,
    rows_of_layer,
)
from jax_te.interop.tables.represent import architecture_of, placed_arrays
from jax_te.interop.tables.targets import check_no_run
