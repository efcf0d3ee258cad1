from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.scheduler import Waiting, schedule

rows = st.lists(
    st.builds(
        Waiting,
        num_tokens=st.integers(1, 600),
        deadline_s=st.floats(0, 5, allow_nan=False).map(lambda s: round(s, 1)),
        order=st.integers(0, 99),
    ),
    max_size=20,
)


def test_the_most_urgent_rows_go_first() -> None:
    late, soon, sooner = (Waiting(10, deadline_s, 0) for deadline_s in (3.0, 2.0, 1.0))
    assert schedule([late, soon, sooner], max_tokens=20) == (2, 1)


def test_rows_that_are_equally_urgent_go_in_the_order_in_which_they_came() -> None:
    assert schedule([Waiting(1, 1.0, 5), Waiting(1, 1.0, 3), Waiting(1, 1.0, 4)], max_tokens=2) == (1, 2)


def test_a_small_row_fills_what_a_large_one_leaves() -> None:
    assert schedule([Waiting(8, 1.0, 0), Waiting(8, 2.0, 0), Waiting(2, 3.0, 0)], max_tokens=10) == (0, 2)


def test_a_row_above_the_budget_runs_alone_when_it_is_the_most_urgent() -> None:
    assert schedule([Waiting(900, 1.0, 0), Waiting(1, 2.0, 0)], max_tokens=512) == (0,)


@given(rows, st.integers(1, 600))
def test_a_step_keeps_its_budget_and_never_starves_the_most_urgent(waiting: list[Waiting], max_tokens: int) -> None:
    plan = schedule(waiting, max_tokens)
    assert len(set(plan)) == len(plan)
    assert bool(plan) == bool(waiting)
    if plan:
        assert waiting[plan[0]].deadline_s == min(row.deadline_s for row in waiting)
    if len(plan) > 1:
        assert sum(waiting[index].num_tokens for index in plan) <= max_tokens
    assert [waiting[i].deadline_s for i in plan] == sorted(waiting[i].deadline_s for i in plan)
    assert schedule(waiting, max_tokens) == plan
