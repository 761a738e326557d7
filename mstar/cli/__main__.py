"""``python -m mstar.cli``: the same as the command ``mstar``."""

import sys

from mstar.cli.main import main

sys.exit(main())
