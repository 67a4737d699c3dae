"""Tests against Transformer Engine itself, in its pure-JAX mode on CPU (NVTE_JAX_CUSTOM_CALLS=false).

Eight CPU devices do no harm: no mesh is set, and TE asks for the capability of device 0 only.
"""

import importlib.util

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]
