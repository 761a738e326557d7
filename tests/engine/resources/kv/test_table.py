import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.table import PageTable


def test_rows_are_padded_with_the_sink_page() -> None:
    table = PageTable(3, 4)
    rows = np.array([table.take_row(), table.take_row()])
    table.extend(rows[0], [5, 6, 7])
    table.extend(rows[1], [9])
    assert table.gather(rows).tolist() == [[5, 6, 7], [9, 0, 0]]
    assert table.gather(rows[1:]).tolist() == [[9]]
    assert table.gather(np.zeros(0, np.int64)).shape == (0, 0)
    assert table.gather(rows).flags.c_contiguous


def test_row_that_was_given_back_comes_empty() -> None:
    table = PageTable(1, 3)
    row = table.take_row()
    table.extend(row, [1, 2, 3])
    table.stored[row] = 9
    assert table.give_row(row).tolist() == [1, 2, 3]
    again = table.take_row()
    assert again == row
    assert (len(table.pages(row)), table.stored[row]) == (0, 0)


def test_row_holds_no_more_than_a_stream_may() -> None:
    table = PageTable(1, 2)
    row = table.take_row()
    with pytest.raises(AssertionError, match="at most 2"):
        table.extend(row, [1, 2, 3])


class TableMachine(RuleBasedStateMachine):
    """Rows against a dictionary of lists, from one row up, so that the table grows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(1, 6)
        self.rows: dict[int, list[int]] = {}
        self.next_page = 1

    @rule()
    def take(self) -> None:
        row = self.table.take_row()
        assert row not in self.rows
        self.rows[row] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(0, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        pages = list(range(self.next_page, self.next_page + min(count, 6 - len(self.rows[row]))))
        self.next_page += count
        self.table.extend(row, pages)
        self.rows[row] += pages

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(row for row in self.rows if self.rows[row])))
        index = data.draw(st.integers(0, len(self.rows[row]) - 1))
        assert self.table.replace(row, index, self.next_page) == self.rows[row][index]
        self.rows[row][index] = self.next_page
        self.next_page += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        keep = data.draw(st.integers(0, len(self.rows[row])))
        assert self.table.cut(row, keep).tolist() == self.rows[row][keep:]
        del self.rows[row][keep:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        assert self.table.give_row(row).tolist() == self.rows.pop(row)

    @invariant()
    def rows_agree(self) -> None:
        rows = sorted(self.rows)
        width = max(map(len, self.rows.values()), default=0)
        padded = [self.rows[row] + [0] * (width - len(self.rows[row])) for row in rows]
        assert self.table.gather(np.array(rows, np.int64)).tolist() == padded
        pairs = [(row, index) for row in rows for index in range(len(self.rows[row]))]
        if pairs:
            own, indices = np.array(pairs).T
            expected = [self.rows[row][index] for row, index in pairs]
            assert self.table.lookup(own, indices).tolist() == expected


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
