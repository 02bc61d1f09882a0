"""`python -m swift_r1` is the `swift` command."""

import sys

from swift_r1.cli.main import main

sys.exit(main())
