"""When refused requests may come again."""

from __future__ import annotations

from collections import Counter

from mempipe.serve.http.retry_after import MAX_RETRY_AFTER_S, Returns, evenly_spread, retry_header


def returns(num_places: int, *seconds: float) -> Returns:
    made = Returns(num_places)
    for each in seconds:
        made.freed(each)
    return made


def test_as_many_come_again_in_a_second_as_places_become_free():
    crowd = returns(4, 2.0)  # two places become free in a second
    assert [crowd.next_s(100.0) for _ in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [crowd.next_s(102.0) for _ in range(2)] == [3, 3], "two seconds later"
    assert crowd.next_s(200.0) == 1, "a time that nobody used has passed"
    fast = returns(4, 0.1)
    assert [fast.next_s(0.0) for _ in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2], "as many as there are places"


def test_a_queue_that_is_too_long_begins_again_at_its_front():
    crowd = returns(1, 1.0)
    told = Counter(crowd.next_s(0.0) for _ in range(310))
    assert max(told) == MAX_RETRY_AFTER_S and set(told) == set(range(1, MAX_RETRY_AFTER_S + 1))
    assert max(told.values()) <= 2 * min(told.values())
    assert returns(1, 1000.0).next_s(0.0) <= MAX_RETRY_AFTER_S, "one answer takes longer than that"


def test_the_latest_answers_count():
    crowd = returns(1, *[100.0] * 50, *[1.0] * 200)
    assert crowd.next_s(0.0) == 2  # ceil of a little more than one second
    assert returns(1).next_s(0.0) == 1, "nothing was answered yet"


def test_only_what_may_be_made_again_has_the_header():
    assert [retry_header(status, 7) for status in (200, 401, 413)] == [None] * 3
    assert retry_header(503, 7) == retry_header(429, 7) == {"Retry-After": "7"}


def test_who_knows_no_rate_spreads_evenly():
    assert set(evenly_spread() for _ in range(1000)) == set(range(1, 11))
