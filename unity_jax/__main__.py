"""`python -m unity_jax ...` is `unity ...`."""

import sys

from unity_jax.cli import main

sys.exit(main())
