"""Collections that are put off: off inside the block, and afterwards as they were before."""

import gc

import pytest

from mempipe.garbage import no_collections


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
