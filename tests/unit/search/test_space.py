import numpy as np
import pytest

from megagraph.config import UserError
from megagraph.config_search import DeviceConfig, SearchConfig
from megagraph.search import space
from megagraph.search.space import list_cells, num_partitions, partitions, random_cuts

BOTH = SearchConfig()


def triples(cells):
    return {(cell.pp, cell.cp, cell.dp) for cell in cells}


def test_partition_counts():
    for num_layers, num_stages, count in ((24, 4, 1771), (32, 4, 4495), (5, 1, 1), (3, 3, 1), (9, 2, 8)):
        rows = np.concatenate(list(partitions(num_layers, num_stages)))
        assert len(rows) == len({tuple(row) for row in rows}) == num_partitions(num_layers, num_stages) == count
        assert rows.shape[1] == num_stages
        assert (rows >= 1).all()
        assert (rows.sum(axis=1) == num_layers).all()


def test_partitions_are_cut_into_chunks(monkeypatch):
    whole = np.concatenate(list(partitions(12, 4)))
    monkeypatch.setattr(space, "CHUNK", 10)
    chunks = list(partitions(12, 4))
    assert max(map(len, chunks)) == 10
    np.testing.assert_array_equal(np.concatenate(chunks), whole)


def test_random_cuts_are_cuts():
    rows = random_cuts(9, 3, 500)
    assert (rows >= 1).all()
    assert (rows.sum(axis=1) == 9).all()
    assert len({tuple(row) for row in rows}) == num_partitions(9, 3)
    assert random_cuts(4, 1, 2).tolist() == [[4], [4]]


def test_strategies(workload):
    four = {cell.strategy for cell in list_cells(workload, 4, (1,))}
    assert four == {"DP", "CP", "PP", "PP+DP", "CP+DP", "PP+CP"}
    assert {cell.strategy for cell in list_cells(workload, 1, (1,))} == {"single"}
    assert "PP+CP+DP" in {cell.strategy for cell in list_cells(workload, 8, (1,))}


def test_the_full_space_of_32_layers_on_four_ranks(workload):
    cells = list_cells(workload.model_copy(update={"layers": 32}), 4, (4,))
    assert sum(num_partitions(32, cell.pp) for cell in cells) == 4560


def test_only_degrees_that_were_profiled(workload):
    heads = workload.model_copy(update={"attention": "all_to_all"})
    assert triples(list_cells(heads, 2, (1,), [1], BOTH)) == {(1, 1, 2), (2, 1, 1)}
    assert triples(list_cells(heads, 2, (1,), [1, 2], BOTH)) == {(1, 1, 2), (2, 1, 1), (1, 2, 1)}
    odd = heads.model_copy(update={"heads": 1, "hidden": 16})
    assert triples(list_cells(odd, 2, (1,), [1, 2], BOTH)) == {(1, 1, 2), (2, 1, 1)}
    with pytest.raises(UserError, match="profiled cp=3: use"):
        list_cells(workload.model_copy(update={"batch": 1}), 4, (1,), [3], BOTH)


def test_1f1b_where_it_exists_and_differs(workload):
    cells = [cell for cell in list_cells(workload, 4, (1, 2, 4), None, BOTH) if cell.schedule == "1f1b"]
    assert {(cell.pp, cell.microbatches) for cell in cells} == {(1, 2), (1, 4), (2, 2), (2, 4), (4, 4)}
    alone = list_cells(workload, 1, (1,), None, SearchConfig(schedules=("1f1b",)))
    assert [(cell.schedule, cell.microbatches) for cell in alone] == [("1f1b", 1)]


def test_weak_batches_belong_to_a_replica(workload):
    single = workload.model_copy(update={"batch": 1, "layers": 1, "attention": "dense"})
    with pytest.raises(UserError, match="no layout"):
        list_cells(single, 4, (1,), None, BOTH)
    weak = SearchConfig(batch_mode="weak")
    assert triples(list_cells(single, 4, (1,), None, weak)) == {(1, 1, 4)}


def test_orders_of_device_types(workload):
    devices = tuple(DeviceConfig(name=name, count=1, memory_gb=1) for name in "ab")
    cells = list_cells(workload, 2, (1,), None, SearchConfig(devices=devices))
    assert {cell.order for cell in cells if cell.pp == 2} == {(0, 1), (1, 0)}
    assert {cell.order for cell in cells if cell.pp == 1} == {(0, 1)}
