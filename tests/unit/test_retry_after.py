"""When refused requests may come again."""

from __future__ import annotations

from collections import Counter

import pytest

from mempipe.serve.http.retry_after import ASSUMED_S, MAX_RETRY_AFTER_S, SOONEST_S, Returns, evenly_spread, retry_header


def returns(num_places: int, *seconds: float) -> Returns:
    """After answers that took so long, one after the other, until second 0."""
    made = Returns(num_places)
    for each in seconds:
        made.taken(0.0)
        made.freed(0.0, each)
    return made


def test_as_many_come_again_in_a_second_as_places_become_free():
    crowd = returns(4, 2.0)  # two places become free in a second
    assert [crowd.next_s(100.0) for _ in range(5)] == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert [crowd.next_s(102.0) for _ in range(2)] == [1.5, 2.0], "two seconds later"
    assert crowd.next_s(200.0) == 1.0, "the times that nobody used have passed"


def test_a_queue_that_is_too_long_begins_again_at_its_front():
    crowd = returns(1, 1.0)
    told = Counter(crowd.next_s(0.0) for _ in range(290))
    assert min(told) == SOONEST_S + 1 and MAX_RETRY_AFTER_S - 1 < max(told) <= MAX_RETRY_AFTER_S
    assert set(told.values()) == {10}


def test_a_queue_whose_clients_do_not_come_is_forgotten():
    crowd = returns(2, 1.0)
    crowd.taken(0.0)
    assert [crowd.next_s(0.0) for _ in range(20)][-1] == 10.5
    crowd.freed(1.0, 1.0)
    crowd.taken(2.9)  # until second 3 the next of the queue may be late
    assert crowd.next_s(2.9) == pytest.approx(11.0 - 2.9)
    crowd.freed(3.9, 1.0)
    crowd.taken(6.0)
    assert crowd.next_s(6.0) == 1.0


def test_a_queue_is_kept_while_a_request_has_a_place():
    crowd = returns(2, 1.0)
    crowd.taken(0.0)
    assert [crowd.next_s(0.0) for _ in range(20)][-1] == 10.5
    crowd.taken(5.0)
    crowd.freed(5.0, 5.0)
    crowd.taken(9.0)
    assert crowd.next_s(9.0) > 1.5


def test_where_one_answer_takes_longer_than_that_all_come_as_late_as_possible():
    crowd = returns(1, 1000.0)
    assert [crowd.next_s(0.0) for _ in range(3)] == [MAX_RETRY_AFTER_S] * 3


def test_the_latest_answers_count():
    crowd = returns(1, *[100.0] * 50, *[1.0] * 400)
    assert crowd.next_s(0.0) == pytest.approx(SOONEST_S + 1.0, abs=0.01)
    assert returns(2).next_s(0.0) == SOONEST_S + ASSUMED_S / 2, "nothing was answered yet"


def test_only_what_may_be_made_again_has_the_headers():
    assert [retry_header(status, 7) for status in (200, 401, 413)] == [None] * 3
    assert retry_header(503, 1.2345) == retry_header(429, 1.2345) == {"Retry-After": "2", "Retry-After-Ms": "1235"}


def test_who_knows_no_rate_spreads_evenly():
    drawn = [evenly_spread() for _ in range(1000)]
    assert SOONEST_S <= min(drawn) < 1 and 9 < max(drawn) <= MAX_RETRY_AFTER_S / 3
