"""`python -m swift_r1` is the `swift` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder: see `module_words`

from swift_r1.cli.main import main  # noqa: E402

sys.exit(main())
