"""What a run writes of its events and of the time of its parts: lines that a full disk cannot spoil."""

import json
import logging
import resource
import threading
import time

from swift_r1.record.events import AppendedLines, Events
from swift_r1.record.spans import Spans, Stopwatch


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_appended_over_runs(tmp_path):
    tell = Events(tmp_path)
    tell("started", "from the beginning", total_steps=5)
    tell.step = 3
    tell("skipped", "loss not finite", step=4)
    Events(tmp_path)("resumed", "from checkpoint-3")
    rows = lines(tmp_path / "events.jsonl")
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("started", 0),
        ("skipped", 4),
        ("resumed", 0),
    ]
    assert rows[0]["total_steps"] == 5 and rows[0]["time"] <= rows[-1]["time"]
    Events()("ended", "nowhere")
    tell("failed", "no file \udcff ä")  # a name that is no UTF-8
    assert lines(tmp_path / "events.jsonl")[-1]["text"] == "no file \udcff ä"


def test_a_stopwatch_adds_up_and_writes_spans(tmp_path):
    spans = Spans(tmp_path)
    watch = Stopwatch(spans.lane("rank-0"))
    spans.step = 7
    with watch.timed("train"):
        pass
    with watch.timed("generate", "wait"):
        pass
    ahead = Stopwatch(spans.lane("rollout-ahead-1", step=9))
    with ahead.timed("generate"):
        pass
    rows = lines(tmp_path / "spans" / "rank-0.jsonl")
    assert [(row["name"], row["step"]) for row in rows] == [("train", 7), ("wait", 7)]
    assert lines(tmp_path / "spans" / "rollout-ahead-1.jsonl")[0]["step"] == 9
    taken = watch.take()
    for row, name in zip(rows, ("train", "generate"), strict=True):
        assert abs(row["end"] - row["start"] - taken[name]) < 1e-6
    assert watch.take() == {}


def test_work_at_the_same_time_is_one_span(tmp_path):
    spans = Spans(tmp_path)
    busy = spans.busy("server-0", "generate")
    began, met = time.time(), threading.Barrier(8)

    def work():
        busy.add()
        busy.add()
        met.wait(10)
        busy.done(2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.begin(1)
    [row] = lines(tmp_path / "spans" / "server-0.jsonl")
    assert began <= row["start"] <= row["end"] <= time.time() and row["step"] == 0
    spans.begin(2)  # nothing since
    busy.add()
    spans.begin(3)  # still at work: what has passed is written all the same
    spans.flush()
    _, one, other = lines(tmp_path / "spans" / "server-0.jsonl")
    assert one["end"] == other["start"] and (one["step"], other["step"]) == (2, 3)


def test_what_a_full_disk_cut_off_spoils_no_other_line(tmp_path, caplog):
    """The limit on a file's size stands for the disk."""
    file = AppendedLines(tmp_path / "events.jsonl")
    file.write({"number": 0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for number in (1, 2, 3):
                file.write({"number": number})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.message.count("is not complete") for record in caplog.records] == [1]
    file.write({"number": 4})
    first, torn, last = file.path.read_text().splitlines()
    assert (json.loads(first), json.loads(last)) == (
        {"number": 0},
        {"number": 4},
    ) and torn == '{"numb'
