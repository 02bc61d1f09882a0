"""Spans and events of a run as they are shown, kills found; and as a trace file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.lab.view.trace import write_trace
from swift_r1.record.folder import find_runs
from swift_r1.runtime.processes import run_folder_held
from tests.lab.runs.made import make_run
from tests.lab.runs.timed import PHASES, START, write_events, write_spans


def timeline_of(run: Path) -> Timeline:
    timeline = Timeline(run)
    timeline.refresh()
    return timeline


def test_lanes_are_those_of_the_files(tmp_path):
    run = make_run(tmp_path / "run")
    for lane in ("rewards", "server-10", "server-2", "rank-0", "rollout-ahead-0"):
        rows = write_spans(run, lane, 5)
    timeline = timeline_of(run)
    assert timeline.lanes == ["rank-0", "rollout-ahead-0", "rewards", "server-2", "server-10"]
    assert timeline.problems == []
    assert [(one.start, one.end, one.name, one.step) for one in timeline.spans("rank-0")] == [
        (row["start"], row["end"], row["name"], row["step"]) for row in rows
    ]
    assert timeline.totals("rank-0") == dict.fromkeys(PHASES, 5.0)
    with (run / "spans" / "rank-0.jsonl").open("a") as file:
        file.write('{"start": 1, "end"')
    assert not timeline.refresh()
    with (run / "spans" / "rank-0.jsonl").open("a") as file:
        file.write(
            ': 0, "name": "x", "step": 1}\n{"start": NaN, "end": 2, "name": "x", "step": 1}\n'
        )
        file.write(
            json.dumps({"start": START + 20, "end": START + 21, "name": "save", "step": 5}) + "\n"
        )
    assert timeline.refresh() and timeline.spans("rank-0")[-1].name == "save"
    assert timeline.problems == ["rank-0.jsonl: 2 damaged lines are left out"]


def test_kills_are_found_in_what_is_missing(tmp_path):
    run = make_run(tmp_path / "run", exit_code=None)
    write_spans(run, "rank-0", 3)  # until 12
    write_spans(run, "rank-0", 1, first=START + 50)  # until 54
    write_events(
        run, (0, 0, "started"), (9, 2, "saved"), (50, 2, "resumed"), (55, 3, "stopping"), (56, 3, "ended"),
        (60, 3, "resumed"), (61, 3, "failed"), (70, 3, "resumed"), (75, 3, "saved"),
    )  # fmt: skip
    found = [(mark.time - START, mark.step, mark.kind) for mark in timeline_of(run).marks]
    assert [one for one in found if one[2] == "killed"] == [(12, 3, "killed"), (75, 3, "killed")]
    assert [time for time, *_ in found] == sorted(time for time, *_ in found) and found[2] == (
        12,
        3,
        "killed",
    )
    with run_folder_held(run):
        assert [mark.kind for mark in timeline_of(run).marks].count("killed") == 1
        assert timeline_of(run).alive_s == 12 + 6 + 1 + 5
    assert timeline_of(run).alive_s == 12 + 6 + 1 + 5
    write_spans(run, "server-0", 20)  # until 80
    own = Timeline(run, "rank-0")
    own.refresh()
    assert (own.lanes, own.alive_s) == (["rank-0"], 12 + 6 + 1 + 5)
    write_events(
        run, (0, 0, "started"), (9, 2, "ended"), (-3600, 2, "resumed"), (-3700, 2, "ended")
    )
    assert timeline_of(run).alive_s == 9  # a clock that was set back takes nothing away


def test_a_trace_has_the_spans_of_the_files(tmp_path):
    pytest.importorskip("perfetto")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    run = make_run(tmp_path / "a run")
    written = {
        lane: write_spans(run, lane, 3, 0.1) for lane in ("rank-0", "rollout-ahead-1", "server-0")
    }
    path = tmp_path / "out.pftrace"
    [folder] = find_runs([run])
    write_trace(folder, path)
    packets = Trace.FromString(path.read_bytes()).packet
    names = {
        one.track_descriptor.uuid: one.track_descriptor.name
        for one in packets
        if one.HasField("track_descriptor")
    }
    assert list(names.values()) == ["a run", "events", *written]
    begins: dict[str, list[tuple[float, str, int]]] = {lane: [] for lane in written}
    ends: dict[str, list[float]] = {lane: [] for lane in written}
    marks = []
    for packet in packets:
        event = packet.track_event
        notes = {note.name: note.int_value or note.string_value for note in event.debug_annotations}
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            begins[names[event.track_uuid]].append(
                (packet.timestamp / 1e9, event.name, notes["step"])
            )
        elif event.type == TrackEvent.TYPE_SLICE_END:
            ends[names[event.track_uuid]].append(packet.timestamp / 1e9)
        elif event.type == TrackEvent.TYPE_INSTANT:
            marks.append((event.name, notes["text"]))
    for lane, rows in written.items():
        assert begins[lane] == [
            (pytest.approx(row["start"], abs=1e-6), row["name"], row["step"]) for row in rows
        ]
        assert ends[lane] == pytest.approx([row["end"] for row in rows], abs=1e-6)
    assert [kind for kind, _ in marks] == ["started", "saved", "ended"]

    write_spans(run, "rank-0", 1)
    write_trace(folder, path)  # the same run a little later
    assert len(Trace.FromString(path.read_bytes()).packet) == len(packets) + 8
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_trace_replaces_nothing_else(tmp_path):
    pytest.importorskip("perfetto")
    [run] = find_runs([make_run(tmp_path / "run")])
    (tmp_path / "plugin.py").write_text("x")
    missing = tmp_path / "missing" / "out.pftrace"
    for path, why in (
        (tmp_path / "plugin.py", "there already"),
        (run.path, "a folder"),
        (missing, "No such file"),
    ):
        with pytest.raises(UsageError, match=why):
            write_trace(run, path)
    assert (tmp_path / "plugin.py").read_text() == "x"
    (run.path / "events.jsonl").unlink()
    (run.path / "logging.jsonl").unlink()
    with pytest.raises(UsageError, match="no spans"):
        write_trace(run, tmp_path / "out.pftrace")
    assert not (tmp_path / "out.pftrace").exists()
