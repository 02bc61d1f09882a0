"""docs/flags.md says what the flags say."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "flags_doc.py"


def test_the_page_of_flags_is_current():
    module = runpy.run_path(str(SCRIPT))
    assert module["PAGE"].read_text() == module["page"](), "run python scripts/flags_doc.py"
