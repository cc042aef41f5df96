"""What a run asks of the machine, and what is said where the machine lacks it."""

import pytest

from megagraph import resources
from megagraph.cli import main
from megagraph.config import RunConfig, UserError


def run(device="cpu", world_size=1, nodes=1, memory_limit_gb=4.0):
    parallel = {"world_size": world_size, "nodes": nodes, "memory_limit_gb": memory_limit_gb}
    return RunConfig.model_validate({"id": "a", "dataset": "d", "device": device, "parallel": parallel})


def test_one_rank_needs_no_mpi():
    """The SLURM plugin refuses mpi for a single task."""
    assert (resources.tasks(run()), resources.mpi(run()), resources.gres(run())) == (1, "", "")


def test_gpus_are_asked_for_per_node():
    four = run("cuda", world_size=4, nodes=2)
    assert (resources.tasks(four), resources.nodes(four), resources.mpi(four)) == (4, 2, "srun")
    assert (resources.gres(four), resources.gres(four, ranks=1)) == ("gpu:2", "gpu:1")


def test_memory_is_per_node():
    assert resources.mem_mb(run(world_size=4, nodes=2)) == 2 * (2000 + 4000)
    assert resources.mem_mb(run(world_size=4, nodes=2), ranks=1) == 2000 + 4000


def test_gpu_memory_is_not_host_memory():
    assert resources.mem_mb(run("cuda", memory_limit_gb=80)) == 2000 + 8000


def test_time_grows_with_the_attempt():
    assert [resources.runtime(30, attempt) for attempt in (1, 2)] == [30, 60]


@pytest.mark.parametrize(("needed", "size", "found"), [(0, 0, []), (2, 80, [85.9, 85.9]), (1, 0, [8.0])])
def test_enough_gpus(needed, size, found):
    resources.check_gpus(needed, size, found)


@pytest.mark.parametrize(
    ("needed", "size", "found", "words"),
    [
        (2, 80, [], "needs 2 GPUs with at least 80 GB, none found"),
        (2, 80, [85.9, 25.2], r"2 found \(86 GB, 25 GB\)"),
        (1, 0, [], "needs 1 GPU, none found"),
    ],
)
def test_too_few_gpus(needed, size, found, words):
    with pytest.raises(UserError, match=words) as error:
        resources.check_gpus(needed, size, found)
    assert "--configfile config/demo.yaml" in str(error.value)


def driver_tool(tmp_path, monkeypatch, script):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_gpus_are_counted_by_the_driver_tool(tmp_path, monkeypatch):
    driver_tool(tmp_path, monkeypatch, "echo 81920\necho 40960\n")
    assert resources.gpu_memories() == pytest.approx([85.899, 42.950], abs=1e-3)


def test_a_broken_driver_is_no_gpu(tmp_path, monkeypatch):
    driver_tool(tmp_path, monkeypatch, "echo 'driver mismatch'\nexit 9\n")
    assert resources.gpu_memories() == []


def test_check_reads_the_config(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    config = tmp_path / "c.yaml"
    config.write_text("title: t\ngpus: 3\ndatasets: {d: {source: digits}}\nruns: {a: {dataset: d}}\n")
    assert main(["check", str(config)]) == 2
    assert "needs 3 GPUs, none found" in capsys.readouterr().err
    assert main(["check", str(config), "--gpus", "0"]) == 0


def test_check_names_an_unknown_key(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("title: t\nruns: {a: {dataset: d, colour: 1}}\ndatasets: {d: {source: digits}}\n")
    assert main(["check", str(config)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(word in err for word in ("c.yaml", "run a", "colour", "unknown key"))
