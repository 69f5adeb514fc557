"""`python -m tailrace.cli`."""

import sys

from tailrace.cli.command_line import main

sys.exit(main())
