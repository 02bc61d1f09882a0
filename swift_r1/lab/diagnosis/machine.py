"""Signs in the machines: memory that is never given back, and one that is slower than the others."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from statistics import fmean

from swift_r1.lab.diagnosis.past import Past, Sign, detector

WARM_UP = 8  # rounds, in which memory may still grow
CREEP = 1.2
CREEP_GIB = 0.2
# of the growth, made by its three largest rises: an allocator's, in evaluations and the like
JUMPS = 0.75
LONGER = 1.1  # completions that grow by more need more memory, at most in proportion
SLOWER = 1.5
# of a step's seconds, and seconds, that pass while nothing but rewards is computed
REWARD_SHARE = 0.5
REWARD_SECONDS = 1.0


@detector("memory creeping", 24, "memory/host_gib", "memory/peak_gib")
def memory_creeping(past: Past, rounds: int) -> Sign | None:
    """Sees memory that has grown in each third since the warm-up, in the last one not much less than in the first,
    not by a few jumps, although completions have not grown, or by less than that."""
    lengths = past.log.get("completions/mean_length")
    for name in ("memory/host_gib", "memory/peak_gib"):
        series = past.log.get(name)
        begin = bisect_right(series.steps, WARM_UP * past.round)
        if past.rounds < WARM_UP + rounds or len(series) - begin < 4:
            continue
        size = min(5, (len(series) - begin) // 4)
        places = [begin + number * (len(series) - begin - size) // 3 for number in range(4)]
        points = [fmean(series.values[place : place + size]) for place in places]
        gains = [after - before for before, after in pairwise(points)]
        grown = (
            points[3] >= CREEP * points[0] and points[3] - points[0] >= CREEP_GIB and min(gains) > 0
        )
        if not grown or gains[2] < gains[0] / 2:
            continue
        peaks = accumulate(series.values[begin:], max)
        rises = sorted(after - before for before, after in pairwise(peaks))
        jumped = sum(rises[-3:]) > JUMPS * sum(rises)
        longer = False
        if len(lengths) == len(series):
            # memory grows at most as much as what is in it
            growth = fmean(lengths.values[-size:]) / max(
                1.0, fmean(lengths.values[begin : begin + size])
            )
            longer = growth > LONGER and growth * points[0] >= points[3]
        if not jumped and not longer:
            what = "of the host" if name == "memory/host_gib" else "(peak)"
            return Sign(
                f"memory {what} grew from {points[0]:.2f} to {points[3]:.2f} GiB since step {series.steps[begin]}, and "
                "keeps growing",
                "look for what a plugin keeps (--reward_isolation process); --save_steps so that a kill costs little",
            )
    return None


def _slow(past: Past, rounds: int, what: str) -> tuple[int, float] | None:
    """Returns which one was `SLOWER` times as slow as the others, the same one all the time, and how many times."""
    times = past.last(f"time/{what}_slowdown", rounds)
    numbers = past.last(f"time/slowest_{what}", rounds)
    if not times or min(times) < SLOWER or len(set(numbers)) != 1 or not numbers[0].is_integer():
        return None
    return int(numbers[0]), fmean(times)


@detector("slow rank", 8, "time/rank_slowdown")
def slow_rank(past: Past, rounds: int) -> Sign | None:
    found = _slow(past, rounds, "rank")
    if found is None:
        return None
    return Sign(
        f"rank {found[0]} takes {found[1]:.1f} times as long as the others for a token, and all wait for it",
        "look at its machine or GPU: other processes, temperature, clocks; swift view shows the ranks' time",
    )


@detector("slow server", 8, "time/server_slowdown")
def slow_server(past: Past, rounds: int) -> Sign | None:
    found = _slow(past, rounds, "server")
    if found is None:
        return None
    return Sign(
        f"rollout server {found[0]} takes {found[1]:.1f} times as long as the others for a token",
        "look at its machine or GPU, and its /metrics; or leave it out: --vllm_server_base_url, --vllm_server_file",
    )


@detector("slow reward", 8, "time/reward")
def slow_reward(past: Past, rounds: int) -> Sign | None:
    """Sees that engine and trainer mostly wait for the reward functions."""
    waits = past.last("time/reward", rounds)
    steps = past.last("time/step", rounds)
    if not waits or not steps or fmean(waits) < REWARD_SECONDS:
        return None
    if fmean(waits) < REWARD_SHARE * fmean(steps):
        return None
    slowest = max(
        past.rewards, key=lambda name: fmean(past.last(f"{name}/seconds", rounds) or [0.0])
    )
    return Sign(
        f"{fmean(waits):.1f} of the {fmean(steps):.1f} s of a step pass in waiting for rewards; most of it is "
        f"{slowest.removeprefix('rewards/')}",
        "more --reward_num_workers; an asynchronous reward, which answers many completions at once; --async_generate true",
    )
