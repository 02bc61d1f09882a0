"""The token record of a run: what the loss saw and did of each token (`tokens/` in the run folder)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.errors import one_line
from swift_r1.runtime.files import regular

if TYPE_CHECKING:
    import pyarrow

_FILE = re.compile(r"step-(\d{6,})\.parquet")
_VOCABULARY = "vocabulary.parquet"
_KEYS = ("step", "round_step", "prompt_id", "request_id", "number", "group", "sequence")


@dataclass(frozen=True)
class RecordedCompletion:
    """A completion in one optimizer step, `T` tokens long; what was not recorded is None."""

    step: int  # optimizer step
    round_step: int | None = None  # its `step` in completions.jsonl
    prompt_id: str | None = None
    request_id: str | None = None
    number: int | None = None  # its place in the group
    group: int | None = None
    # which of the completion's rows it is: an agent's episode may have several
    sequence: int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None  # `T`, as all below
    mask: list[bool] | None = None  # in the loss
    written: list[bool] | None = None  # by the policy, which is trained on them
    rollout_logps: list[float] | None = None  # the engine's
    logps: list[float] | None = None  # the trainer's, in this step
    ratios: list[float] | None = None
    clipped: list[int] | None = None  # -1 at the lower bound, 1 at the upper, 0 not
    entropies: list[float] | None = None
    advantages: list[float] | None = None
    weight_versions: list[int] | None = None
    ref_logps: list[float] | None = None


class TokenRecord:
    """The record in `run_path`, which may have none. Files are listed anew at each call: a run adds to them."""

    def __init__(self, run_path: Path) -> None:
        self.folder = run_path / "tokens"
        self._faults: dict[str, str] = {}  # by file
        self._known: tuple[dict[int, bytes], frozenset[int]] | None = None

    @property
    def problems(self) -> list[str]:
        """Returns the files that could not be read, a line each."""
        return list(self._faults.values())

    def steps(self) -> list[int]:
        """Returns the recorded optimizer steps."""
        try:
            names = [entry.name for entry in self.folder.iterdir()]
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._faults["tokens"] = (
                    f"tokens/ cannot be read: {error.strerror or one_line(error)}"
                )
            return []
        return sorted(int(found[1]) for name in names if (found := _FILE.fullmatch(name)))

    def completions(self, step: int) -> list[RecordedCompletion]:
        """Returns the completions that an optimizer step recorded, without their tokens."""
        return _rows(self._table(step, _KEYS))

    def columns(self, step: int, names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns these columns of the completions that an optimizer step recorded; None where they were not."""
        table = self._table(step, names)
        return [] if table is None else table.select(list(names)).to_pylist()

    def completion(
        self, round_step: int, request_id: str, number: int | None
    ) -> list[RecordedCompletion]:
        """Returns a completion in each recorded optimizer step that trained on it."""
        found: list[RecordedCompletion] = []
        for step in self.steps():
            if step < round_step:
                continue
            keys = self._table(step, ("round_step", "request_id", "number"))
            if keys is None or not keys.num_rows:
                continue
            rounds = [value for value in keys.column("round_step").to_pylist() if value is not None]
            if rounds and min(rounds) > round_step:
                break
            places = [
                place
                for place, row in enumerate(keys.to_pylist())
                if (row["round_step"], row["request_id"]) == (round_step, request_id)
                and number in (None, row["number"])
            ]
            if places and (table := self._table(step)) is not None:
                found += _rows(table.take(places))
        return found

    @property
    def _vocabulary(self) -> tuple[dict[int, bytes], frozenset[int]]:
        """Returns the bytes of each token id, and which ids are special tokens; kept once the file is there."""
        if self._known is not None:
            return self._known
        columns = ("token_id", "bytes", "special")
        table = self._read(_VOCABULARY, columns)
        rows = [] if table is None else table.to_pylist()
        known = {row["token_id"]: row["bytes"] for row in rows}
        found = known, frozenset(row["token_id"] for row in rows if row["special"])
        if table is not None or _VOCABULARY in self._faults:
            self._known = found
        return found

    def is_of(self, vocabulary: Sequence[tuple[bytes, bool]]) -> bool:
        """Returns whether its tokens are these: of each id the bytes, and whether it is special. True where it does not
        say."""
        known, special = self._vocabulary
        own = frozenset(one for one, (_, is_special) in enumerate(vocabulary) if is_special)
        return not known or (known, special) == (
            {one: text for one, (text, _) in enumerate(vocabulary)},
            own,
        )

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary[1]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as text. A character whose bytes are in several tokens is the last one's; bytes that are
        no character become U+FFFD. An unknown token is `<id>`."""
        known, _ = self._vocabulary
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = [
            decoder.decode(known[one])
            if known.get(one) is not None
            else decoder.decode(b"", True) + f"<{one}>"
            for one in token_ids
        ]
        if found:
            found[-1] += decoder.decode(b"", True)
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces(token_ids))

    def _table(self, step: int, columns: Sequence[str] = ()) -> pyarrow.Table | None:
        return self._read(f"step-{step:06d}.parquet", columns)

    def _read(self, name: str, columns: Sequence[str]) -> pyarrow.Table | None:
        """Returns the columns of a file (all without any), as far as it has them; None where it cannot be read."""
        import pyarrow
        from pyarrow import parquet

        try:
            with (
                open(self.folder / name, "rb", opener=regular) as raw,
                parquet.ParquetFile(raw) as file,
            ):
                there = file.schema_arrow.names
                table = file.read([column for column in columns or _COLUMNS if column in there])
            table.validate(full=True)
        except FileNotFoundError:
            return None
        except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
            self._faults[name] = f"tokens/{name} cannot be read: {one_line(error, 120)}"
            return None
        self._faults.pop(name, None)
        for column in columns:
            if column not in table.column_names:
                table = table.append_column(column, pyarrow.nulls(table.num_rows))
        return table


_COLUMNS = tuple(field.name for field in fields(RecordedCompletion))


def _rows(table: pyarrow.Table | None) -> list[RecordedCompletion]:
    return [] if table is None else [RecordedCompletion(**row) for row in table.to_pylist()]
