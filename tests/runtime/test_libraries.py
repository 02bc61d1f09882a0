"""Large imports: the collector rests while they go on, and works again behind them."""

from __future__ import annotations

import gc

from swift_r1.runtime.libraries import large_imports


def test_the_collector_rests_and_works_again() -> None:
    before = gc.get_freeze_count()
    with large_imports():
        imported = [[place] for place in range(10)]
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(imported)
