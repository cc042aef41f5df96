"""A process killed at any moment of a save leaves a whole checkpoint; what is not whole is not taken for one."""

import errno
import multiprocessing
import os
import shutil
import signal
import sys
from itertools import pairwise

import pytest

from megagraph.config import UserError

pytestmark = pytest.mark.distributed

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "open"}


def model_and_optimizer(value, width=3):
    import torch

    model = torch.nn.Linear(width, 2)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


def saving(folder, values, keep=1, die_at=None):
    """Save one checkpoint per value, one step apart; the last save is killed at its change number `die_at`."""
    from megagraph.parallel.checkpoint import Position, save
    from megagraph.parallel.mesh import process_group

    with process_group(1, "cpu", 60.0):
        kept = []
        for step, value in enumerate(values, 1):
            if step == len(values) and die_at is not None:
                die_after(die_at)
            state = {"value": value}
            path = save(folder, Position(0, step), *model_and_optimizer(value), state, kept[len(kept) - keep + 1 :])
            kept = [*kept, path]


def die_after(count):
    """Kill this process at its `count`-th change of the file system from now."""
    left = [count]

    def hook(event, arguments):
        if event in CHANGES and not (event == "open" and not writes(arguments)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def writes(arguments):
    _, mode, flags = arguments
    return any(letter in (mode or "") for letter in "wxa+") or bool(flags & (os.O_WRONLY | os.O_RDWR))


def in_child(*arguments):
    """Exit code of `saving` in a process of its own."""
    child = multiprocessing.get_context("fork").Process(target=saving, args=arguments)
    child.start()
    child.join(60)
    return child.exitcode


def value_of(path):
    """The saved weight, all of it the same number."""
    import torch

    from megagraph.parallel.checkpoint import progress_of, read_into

    state = {"weight": torch.zeros(2, 3)}
    read_into({"model": state}, path, remedy="")
    (value,) = state["weight"].unique().tolist()
    assert value == progress_of(path)["value"]
    return value


def test_a_save_killed_anywhere_leaves_the_last_one_or_itself(run_ranks, tmp_path):
    from megagraph.parallel.checkpoint import checkpoints

    found, die_at = [], 0
    while True:
        die_at += 1
        folder = tmp_path / str(die_at)
        code = in_child(folder, [1.0, 2.0], 1, die_at)
        found.append(value_of(checkpoints(folder)[-1]))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert in_child(folder, [3.0]) == 0, "what is left does not disturb the next save"
        assert [path.name for path in sorted(folder.iterdir())] == ["000000-000001"]
    assert die_at > 8
    assert found == sorted(found), "first the one before, then the new one"
    assert set(found) == {1.0, 2.0}
    assert found.count(2.0) >= 3, "killed while the older one was removed, too"


def on_a_full_disk(folder):
    """The second save finds no room; returns the error of the system."""
    import torch.distributed.checkpoint.filesystem as filesystem

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saving(folder, [1.0])
    filesystem.os.fsync = full
    with pytest.raises(OSError) as caught:
        saving(folder, [2.0, 3.0])
    return caught.value.errno


def test_a_full_disk_is_the_systems_error_and_leaves_the_last_one(run_ranks, tmp_path):
    from megagraph.parallel.checkpoint import checkpoints

    assert run_ranks(1, on_a_full_disk, tmp_path) == [errno.ENOSPC]
    assert [value_of(path) for path in checkpoints(tmp_path)] == [1.0]


def test_the_last_n_stay(run_ranks, tmp_path):
    from megagraph.parallel.checkpoint import checkpoints

    assert in_child(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0], 3) == 0
    assert [value_of(path) for path in checkpoints(tmp_path)] == [3.0, 4.0, 5.0]
    assert in_child(tmp_path, [6.0], 3) == 0, "another run's checkpoints go, later ones, too"
    assert [value_of(path) for path in checkpoints(tmp_path)] == [6.0]


def test_order_is_that_of_epoch_and_step(tmp_path):
    from megagraph.parallel.checkpoint import Position

    later = [Position(0, 1), Position(1), Position(1, 9), Position(1, 10), Position(2), Position(1_000_000)]
    assert all(first < second for first, second in pairwise(later))
    assert [Position.of(tmp_path / position.name) for position in later] == later
    assert Position(12).name == "000012" and Position(12, 3).name == "000012-000003"
    assert Position.of(tmp_path / ".000012.part") is None


def lose_progress(path):
    (path / "progress.json").unlink()


def cut_progress(path):
    (path / "progress.json").write_text((path / "progress.json").read_text()[:-5])


def lose_a_shard(path):
    next(path.glob("*.distcp")).unlink()


def cut_a_shard(path):
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-10])


def lose_metadata(path):
    (path / ".metadata").unlink()


@pytest.mark.parametrize("tear", [lose_progress, cut_progress, lose_a_shard, cut_a_shard, lose_metadata])
def test_a_torn_checkpoint_is_ignored_and_told_of(run_ranks, tmp_path, caplog, tear):
    from megagraph.parallel.checkpoint import checkpoints

    assert in_child(tmp_path, [1.0, 2.0], 2) == 0
    assert len(checkpoints(tmp_path)) == 2
    tear(tmp_path / "000000-000002")
    with caplog.at_level("INFO"):
        assert [value_of(path) for path in checkpoints(tmp_path)] == [1.0]
    assert "000000-000002 is not complete" in caplog.text
    shutil.rmtree(tmp_path / "000000-000001")
    assert checkpoints(tmp_path) == []


def test_a_checkpoint_of_another_model_is_refused(run_ranks, tmp_path):
    assert in_child(tmp_path, [1.0]) == 0
    message = run_ranks(1, refused, tmp_path / "000000-000001")[0]
    assert "another model" in message and "remove it" in message
    assert "\n" not in message


def refused(path):
    from megagraph.parallel.checkpoint import load
    from megagraph.parallel.mesh import process_group

    with process_group(1, "cpu", 60.0), pytest.raises(UserError) as caught:
        load(path, *model_and_optimizer(0.0, width=4))
    return str(caught.value)
