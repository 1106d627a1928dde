"""Order of the waiting queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.waiting_queue import WaitingQueue
from batchgen.types import Request, SamplingParams


def request(request_id, priority=0):
    return Request(request_id, [1], SamplingParams(), priority=priority)


def test_priority_then_arrival_then_the_preempted_first():
    queue = WaitingQueue()
    for i, priority in enumerate([0, 1, 0, 1]):
        queue.push_back(request(i, priority))
    queue.push_front(request(4, 0))
    queue.push_front(request(5, 1))
    assert [r.request_id for r in queue] == [5, 1, 3, 4, 0, 2]
    assert len(queue) == 6


def test_an_empty_queue_has_no_head():
    queue = WaitingQueue()
    assert queue.peek() is None
    queue.push_back(one := request(1, 7))
    queue.remove(one)
    assert queue.peek() is None
    assert len(queue) == 0
    with pytest.raises(KeyError):
        queue.remove(one)


@given(
    st.lists(st.tuples(st.sampled_from(["back", "front", "pop", "remove"]), st.integers(-2, 2)), max_size=60)
)
def test_it_agrees_with_a_sorted_list(actions):
    queue, model = WaitingQueue(), []
    for i, (action, value) in enumerate(actions):
        new = request(i, value)
        if action == "back":
            queue.push_back(new)
            model.append(new)
        elif action == "front":
            queue.push_front(new)
            model.insert(0, new)
        elif model:
            gone = model[value % len(model)] if action == "remove" else queue.peek()
            queue.remove(gone)
            model.remove(gone)
        ordered = sorted(model, key=lambda r: -r.priority)
        assert list(queue) == ordered
        assert queue.peek() is (ordered[0] if ordered else None)
        assert len(queue) == len(model)
