"""``python -m jax_te`` is ``jax-te``."""

from jax_te.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
