"""A run's time as a Perfetto trace, for ui.perfetto.dev or another viewer of such files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.lab.runs.timeline import Timeline
from swift_r1.record.folder import RunFolder

_SUFFIX = ".pftrace"
_SEQUENCE = 1  # of packets, of which there is one


def write_trace(run: RunFolder, path: Path) -> None:
    """Writes a track per lane with its spans, and one with what happened. A file of that name is replaced, as a whole,
    where it is a trace by its name. Raises UsageError: it is none, the file cannot be written, or there is nothing to
    write."""
    if find_spec("perfetto") is None:
        raise UsageError("--trace: perfetto is not installed: pip install 'swift-r1[view]'")
    if path.is_dir() or (path.exists() and path.suffix != _SUFFIX):
        what = (
            "a folder"
            if path.is_dir()
            else f"there already, and its name does not end in {_SUFFIX}"
        )
        raise UsageError(f"--trace {path}: it is {what}: give the name of a new file")
    timeline = Timeline(run.path)
    timeline.refresh()
    if timeline.extent is None:
        raise UsageError(
            f"--trace: {run.path} has no spans/, events.jsonl or times in logging.jsonl"
        )
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            builder = StreamingTraceProtoBuilder(file)
            for packet in _packets(timeline, run.name):
                builder.write_packet(packet)
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _packets(timeline: Timeline, name: str) -> Iterator[Any]:
    """Track 1 is the run, 2 its events, 3 and on its lanes."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
        TracePacket,
        TrackDescriptor,
        TrackEvent,
    )

    def packet(time: float | None = None) -> Any:
        made = TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        if time is not None:
            made.timestamp = round(time * 1e9)
        return made

    tracks = ["events", *timeline.lanes]
    run = packet()
    run.track_descriptor.uuid = 1
    run.track_descriptor.name = name
    run.track_descriptor.child_ordering = TrackDescriptor.EXPLICIT
    run.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    yield run
    for number, track in enumerate(tracks, start=2):
        made = packet()
        made.track_descriptor.uuid = number
        made.track_descriptor.parent_uuid = 1
        made.track_descriptor.name = track
        made.track_descriptor.sibling_order_rank = number
        yield made

    def event(time: float, kind: int, track: int, name: str = "", **more: int | str) -> Any:
        made = packet(time)
        made.track_event.type = kind
        made.track_event.track_uuid = track
        made.track_event.name = name
        for key, value in more.items():
            note = made.track_event.debug_annotations.add(name=key)
            if isinstance(value, int):
                note.int_value = value
            else:
                note.string_value = value
        return made

    for mark in timeline.marks:
        yield event(
            mark.time,
            TrackEvent.TYPE_INSTANT,
            2,
            mark.kind,
            step=mark.step,
            text=mark.text,
        )
    for number, lane in enumerate(timeline.lanes, start=3):
        for span in timeline.spans(lane):
            yield event(span.start, TrackEvent.TYPE_SLICE_BEGIN, number, span.name, step=span.step)
            yield event(span.end, TrackEvent.TYPE_SLICE_END, number)
