"""Garbage collections: put off inside a block, and made although another thread is at one."""

import gc
import threading
import weakref

import pytest

from mempipe import garbage
from mempipe.garbage import collect_garbage, no_collections


def test_there_are_none_inside_the_block_however_it_ends():
    assert gc.isenabled()
    with pytest.raises(ImportError), no_collections():
        with no_collections():
            pass
        assert not gc.isenabled()
        raise ImportError("no library")
    assert gc.isenabled()


def test_who_has_none_at_all_gets_none():
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def dead_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


@pytest.fixture
def may_end():
    """Another thread is at a collection, until the event is set."""
    begins, may_end = threading.Event(), threading.Event()

    def wait(phase, info):
        if phase == "start" and threading.current_thread() is other:
            begins.set()
            assert may_end.wait(60)

    other = threading.Thread(target=gc.collect)
    gc.callbacks.append(wait)
    other.start()
    assert begins.wait(60)
    yield may_end
    may_end.set()
    other.join()
    gc.callbacks.remove(wait)


def test_a_cycle_is_freed_although_another_thread_is_at_a_collection(may_end):
    cycle = dead_cycle()
    gc.collect()
    assert cycle() is not None, "Python's own call does nothing then"
    threading.Timer(0.05, may_end.set).start()
    collect_garbage()
    assert cycle() is None


def test_it_waits_for_another_collection_for_a_limited_time(may_end, monkeypatch):
    monkeypatch.setattr(garbage, "NUM_TRIES", 3)
    cycle = dead_cycle()
    collect_garbage()
    assert cycle() is not None, "it has returned during the other collection"
