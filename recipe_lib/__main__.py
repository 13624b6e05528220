"""`python -m recipe_lib` is `tune`."""

import sys

from recipe_lib.cli.main import main

sys.exit(main())
