"""`python -m tailrace`: the command `tailrace`, by the Python that is named."""

import sys

from tailrace.cli.command_line import main

sys.exit(main())
