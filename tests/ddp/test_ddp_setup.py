"""Does ddp_setup decide rightly? Launchers, the place of rank 0, devices, samplers; one process."""
import builtins
import dataclasses
import importlib.metadata
import itertools
import os
import random
import re
import socket
import sys
import types

import numpy as np
import pytest
import torch

import ddp_setup
from ddp_setup import (
    Ddp,
    SetupError,
    abort,
    all_mean,
    all_sum,
    barrier,
    broadcast,
    choose_device,
    cleanup_ddp,
    ddp_sampler,
    detect_launcher,
    gather,
    optimize_with_ipex,
    print0,
    setup_ddp,
    slurm_step,
    wait_for_ranks,
    wrap_ddp,
)
from launchers import clean_environment, fork_ranks


# ---------------------------------------------------------------- launchers
class Place:
    """A rank of a launch, and the variables by which each launcher tells it, as documented or
    measured."""

    def __init__(self, rank=5, size=8, local_rank=1, local_size=4, nodes=2):
        self.rank = str(rank)
        self.size = str(size)
        self.local_rank = str(local_rank)
        self.local_size = str(local_size)
        self.nodes = str(nodes)

    def torchrun(self):
        return dict(RANK=self.rank, WORLD_SIZE=self.size, LOCAL_RANK=self.local_rank,
                    LOCAL_WORLD_SIZE=self.local_size, GROUP_RANK="1", MASTER_ADDR="n0",
                    MASTER_PORT="29400", TORCHELASTIC_RUN_ID="none")

    def open_mpi(self):
        return dict(OMPI_COMM_WORLD_RANK=self.rank, OMPI_COMM_WORLD_SIZE=self.size,
                    OMPI_COMM_WORLD_LOCAL_RANK=self.local_rank,
                    OMPI_COMM_WORLD_LOCAL_SIZE=self.local_size, OMPI_COMM_WORLD_NODE_RANK="1",
                    OMPI_UNIVERSE_SIZE="2", **self.pmix())

    def pals(self):
        return dict(PALS_RANKID=self.rank, PALS_LOCAL_RANKID=self.local_rank, PALS_NODEID="1",
                    PALS_APID="a1")

    def hydra(self):
        return dict(PMI_RANK=self.rank, PMI_SIZE=self.size, MPI_LOCALRANKID=self.local_rank,
                    MPI_LOCALNRANKS=self.local_size, PMI_FD="9")

    def pmi2(self):
        """Of Slurm's plugin: nothing about the host."""
        return dict(PMI_RANK=self.rank, PMI_SIZE=self.size, PMI_FD="9", PMI_JOBID="77.0")

    def pmix(self):
        return dict(PMIX_RANK=self.rank, PMIX_NAMESPACE="prterun-n0-17@1")

    def slurm(self):
        return dict(SLURM_JOB_ID="77", SLURM_STEP_ID="0", SLURM_PROCID=self.rank,
                    SLURM_STEP_NUM_TASKS=self.size, SLURM_NTASKS="16",
                    SLURM_LOCALID=self.local_rank, SLURM_STEP_NUM_NODES=self.nodes,
                    SLURM_STEP_NODELIST="n[0-1]",
                    SLURM_STEP_TASKS_PER_NODE=f"{self.local_size}(x{self.nodes})")

    def by_hand(self):
        return dict(DDP_RANK=self.rank, DDP_WORLD_SIZE=self.size, DDP_LOCAL_RANK=self.local_rank)


FIFTH = Place()
POLARIS = {**FIFTH.pals(), "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1",
           "PMI_LOCAL_SIZE": "4"}
AURORA = {**FIFTH.pals(), "PALS_LOCAL_SIZE": "4", "PMIX_RANK": "5", "PMI_SIZE": ""}
BATCH_SHELL = dict(SLURM_JOB_ID="77", SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_LOCALID="0",
                   SLURM_NODEID="0", SLURM_TASKS_PER_NODE="4(x2)")
ALONE = Place(rank=0, size=1, local_rank=0, local_size=1, nodes=1)
MPI = object()    # stands for mpi4py's COMM_WORLD


@pytest.mark.parametrize("env, name, mpi", [
    (FIFTH.by_hand(), "DDP_*", None), (FIFTH.torchrun(), "torchrun", None),
    (FIFTH.open_mpi(), "Open MPI", None), (FIFTH.hydra(), "Hydra", None),
    (FIFTH.slurm(), "Slurm", None), (POLARIS, "PALS", None),
    ({**AURORA, "DDP_WORLD_SIZE": "8"}, "PALS", None), (AURORA, "PALS", (5, 8))])
def test_every_launcher_is_known_by_its_variables(env, name, mpi):
    place = detect_launcher(env, mpi)
    assert name in place.launcher
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
    assert place.local_world_size in (4, None)


def test_a_folder_that_an_mpi4py_has_left_behind_counts_as_none(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert ddp_setup._start_mpi(FIFTH.hydra(), 60) is None


@pytest.mark.parametrize("env, name", [
    ({**Place(rank=1).slurm(), **FIFTH.torchrun()}, "torchrun"),    # srun torchrun
    ({**BATCH_SHELL, **FIFTH.open_mpi()}, "Open MPI"),              # mpirun in a job of sbatch
    ({**ALONE.slurm(), **FIFTH.hydra()}, "Hydra"),                  # and in a step of one task
    ({**Place(rank=1).open_mpi(), **FIFTH.by_hand()}, "DDP_*"),
    ({**ALONE.slurm(), **ALONE.pmi2(), **FIFTH.torchrun(), "TORCHELASTIC_RUN_ID": ""}, "torchrun"),
    ({**FIFTH.open_mpi(), "RANK": "0", "WORLD_SIZE": "8"}, "Open MPI")])
def test_of_nested_launchers_the_innermost_counts(env, name):
    place = detect_launcher(env)
    assert name in place.launcher
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)


@pytest.mark.parametrize("here", [FIFTH, Place(rank=3, size=4, local_rank=3, nodes=1)],
                         ids=["two nodes", "one node"])
@pytest.mark.parametrize("one, other", itertools.combinations(
    ["hydra", "pmi2", "pmix", "pals", "slurm", "open_mpi", "torchrun"], 2))
def test_variables_of_two_launchers_that_agree_give_the_rank_and_a_place_for_rank_0(
        one, other, here):
    env = {**getattr(here, one)(), **getattr(here, other)()}
    pair = {one, other}
    if pair == {"pals", "pmix"}:    # Aurora's, which set no number of ranks
        env["DDP_WORLD_SIZE"] = here.size
    if pair == {"pmi2", "pmix"}:    # nothing tells the local rank
        with pytest.raises(SetupError, match="no variable tells its number within the host"):
            detect_launcher(env)
        return
    ddp = detect_launcher(env)
    assert ddp.rank == int(here.rank) and ddp.world_size == int(here.size)
    assert ddp.local_rank == int(here.local_rank)
    knows_where = {"slurm", "torchrun"} & pair or (here.nodes == "1" and ddp.on_one_host)
    if not knows_where:
        ddp = dataclasses.replace(ddp, mpi=MPI)
    host = ddp_setup._place_of_rank_0(ddp, env).host
    if "torchrun" in pair or ("slurm" in pair and here.nodes == "2"):
        assert host == "n0"    # the first of the step's nodes, or MASTER_ADDR


@pytest.mark.parametrize("left_over", [
    {}, ALONE.pmi2(), ALONE.hydra(), ALONE.pmix(), ALONE.open_mpi(), ALONE.pals()],
    ids=["none", "PMI2", "PMI", "PMIx", "Open MPI", "PALS"])
@pytest.mark.parametrize("env", [
    {}, ALONE.slurm(),                                              # srun -n 1
    {**ALONE.slurm(), "SLURM_NTASKS": "1", "DDP_WORLD_SIZE": "1"},
    BATCH_SHELL,                                                    # sbatch's, or salloc's
    {**BATCH_SHELL, **ALONE.slurm(), "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "8"}],
    ids=["nothing", "a step of one task", "one task, wanted", "a job's shell", "salloc's shell"])
def test_one_task_is_one_process_whatever_else_agrees(env, left_over):
    if left_over == ALONE.pals() and "SLURM_STEP_ID" not in env:
        left_over = {**left_over, "PMI_SIZE": "1"}    # as PALS alone sets it
    place = detect_launcher({**env, **left_over})
    assert (place.rank, place.world_size, place.local_rank) == (0, 1, 0)
    assert place.on_one_host


@pytest.mark.parametrize("env", [{"RANK": "3", "WORLD_SIZE": "4"}, {"PALS_LOCAL_RANKID": "0"},
                                 {"LOCAL_RANK": "0"}, {"RANK": "genus"}])
def test_what_no_launcher_sets_alone_is_taken_for_left_over(env):
    assert detect_launcher(env).world_size == 1


def test_one_process_in_a_job_of_several_tasks_is_told_how_to_start_all():
    said = " ".join(detect_launcher(BATCH_SHELL).notes)
    assert "8 tasks, and this is ONE process in its shell. To start all: srun python" in said
    assert "ATTENTION" not in " ".join(detect_launcher(ALONE.hydra()).notes)


def test_the_one_rank_of_a_torchrun_keeps_its_place_within_an_outer_launch():
    env = {**FIFTH.slurm(), **ALONE.torchrun()}
    place = detect_launcher(env)
    assert (place.launcher, place.rank, place.world_size) == ("torchrun", 0, 1)


def step_of(env, monkeypatch, terminal=False):
    """The step that is cancelled when a rank in this environment fails, or ""."""
    monkeypatch.setattr(os, "environ", env)
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    return slurm_step(detect_launcher(env))


@pytest.mark.parametrize("env, step", [
    ({**FIFTH.slurm(), **FIFTH.pmi2()}, "77.0"),
    ({**BATCH_SHELL, **ALONE.slurm()}, ""),    # salloc's shell
    ({**ALONE.slurm(), **ALONE.torchrun()}, ""),
    ({**Place(rank=1).slurm(), **FIFTH.torchrun()}, "")])
def test_a_step_is_that_of_all_ranks_only_if_srun_has_started_each_of_them(env, step, monkeypatch):
    assert step_of(env, monkeypatch) == step


def test_at_a_terminal_a_step_may_be_a_persons_shell(monkeypatch):
    assert step_of(FIFTH.slurm(), monkeypatch, terminal=True) == ""


@pytest.mark.parametrize("launcher", ["torchrun", "open_mpi", "hydra"])
def test_a_rank_whose_numbers_are_by_chance_those_of_its_task_meets_the_others(
        launcher, monkeypatch):
    """In a shell of `srun -n 4`, or in each of four tasks, a launcher starts four ranks."""
    task = Place(rank=0, size=4, local_rank=0, nodes=1).slurm()
    meetings = set()
    for rank in range(4):
        env = {**task, **getattr(Place(rank, 4, rank, 4), launcher)()}
        ddp = detect_launcher(env)
        assert (ddp.rank, ddp.world_size) == (rank, 4) and step_of(env, monkeypatch) == ""
        meetings.add((ddp_setup._place_of_rank_0(ddp, env), ddp_setup._launch_name(ddp, env)))
    assert len(meetings) == 1


def test_a_slurm_step_is_on_one_host_if_it_says_that_it_has_one_node():
    assert detect_launcher({**FIFTH.slurm(), "SLURM_STEP_NUM_NODES": "1"}).on_one_host
    assert not detect_launcher(FIFTH.slurm()).on_one_host


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize("env, mpi, words", [
    (without(FIFTH.open_mpi(), "OMPI_COMM_WORLD_SIZE"), None,
     ("OMPI_COMM_WORLD_RANK=5", "DDP_WORLD_SIZE")),
    (without(FIFTH.open_mpi(), "OMPI_COMM_WORLD_LOCAL_RANK"), None,
     ("OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_LOCAL_RANK")),
    (FIFTH.pmi2(), None, ("rank 5 of 8", "PMI_RANK=5")),
    (without(FIFTH.torchrun(), "LOCAL_RANK"), None, ("RANK=5", "LOCAL_RANK")),
    ({"RANK": "1", "LOCAL_RANK": "1"}, None, ("RANK=1", "DDP_WORLD_SIZE")),
    (AURORA, None, ("PALS", "DDP_WORLD_SIZE")),
    (FIFTH.hydra(), (0, 1), ("mpi4py", "rank 0 of 1", "rank 5 of 8")),
    (AURORA, (0, 1), ("mpi4py", "rank 0 of 1", "PALS", "rank 5")),
    ({**FIFTH.hydra(), "PMI_RANK": "8"}, None, ("rank 8", "0 to 7")),
    ({**FIFTH.hydra(), "MPI_LOCALRANKID": "4"}, None, ("local rank 4",)),
    ({**FIFTH.by_hand(), "DDP_RANK": "-1"}, None, ("rank -1", "0 to 7")),
    ({**FIFTH.hydra(), "PMI_SIZE": "eight"}, None, ("PMI_SIZE='eight'",))])
def test_half_a_launcher_or_one_that_mpi4py_denies_is_refused_with_what_was_seen(env, mpi, words):
    with pytest.raises(SetupError) as caught:
        detect_launcher(env, mpi)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.code == 2


def test_ranks_without_MASTER_ADDR_are_several_all_the_same():
    """One process each would end with code 0 and a wrong result."""
    place = detect_launcher(without(FIFTH.torchrun(), "MASTER_ADDR", "TORCHELASTIC_RUN_ID"))
    assert (place.rank, place.world_size) == (5, 8)


# ---------------------------------------------------------------- where is rank 0?
def test_first_host_of_a_slurm_list():
    for text, host in (("n1,n2", "n1"), ("a[003-5,9]-ib,b3", "a003-ib"),
                       ("r[07-10]n[1-4]", "r07n1"), ("x-1-[12,14-16]", "x-1-12")):
        assert ddp_setup._first_host(text) == host


def test_the_hosts_of_a_job_count_where_those_of_the_step_are_not_told():
    env = {**without(FIFTH.slurm(), "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "n[01-03,7]"}
    assert ddp_setup._place_of_rank_0(detect_launcher(env), env).host == "n01"


def test_a_step_that_tells_no_hosts_is_refused():
    env = without(FIFTH.slurm(), "SLURM_STEP_NODELIST")
    with pytest.raises(SetupError, match="MASTER_ADDR"):
        ddp_setup._place_of_rank_0(detect_launcher(env), env)


def test_ranks_on_one_host_ask_no_name_service(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name: pytest.fail(f"asked for {name}"))
    alone = Ddp(world_size=2, local_world_size=2, launcher="torchrun")
    for env in ({"MASTER_ADDR": "n0"}, {}):
        ddp_setup._place_of_rank_0(alone, env)


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n[0-3]"}


@pytest.mark.parametrize("launcher, per_host, mpi, env, place", [
    ("torchrun", 2, None, dict(MASTER_ADDR="127.0.0.5"), ("127.0.0.5", 29500, "from MASTER_ADDR")),
    ("torchrun", 2, None, dict(MASTER_PORT="7"), ("127.0.0.1", 7, "from MASTER_PORT")),
    ("torchrun", 2, None, dict(MASTER_ADDR="n0", MASTER_PORT="7"), ("n0", 7, "from MASTER_ADDR")),
    ("Slurm step", None, None, dict(STEP, MASTER_PORT="7"), ("n0", 7, "from MASTER_PORT")),
    ("Open MPI", 2, MPI, {}, ("127.0.0.1", 0, "by MPI broadcast")),
    ("Open MPI", None, MPI, {}, ("10.0.0.9", 0, "by MPI broadcast")),
    ("Open MPI", None, MPI, dict(MASTER_PORT="7"), ("10.0.0.9", 7, "by MPI broadcast")),
    ("Open MPI", None, MPI, dict(MASTER_ADDR="n0"),
     ("n0", 29500, "from MASTER_ADDR"))])
def test_the_place_of_rank_0(launcher, per_host, mpi, env, place, monkeypatch):
    monkeypatch.setattr(ddp_setup, "_own_address", lambda: "10.0.0.9")
    ddp = Ddp(world_size=2, local_world_size=per_host, launcher=launcher, mpi=mpi)
    assert ddp_setup._place_of_rank_0(ddp, env) == place


def test_other_hosts_reach_this_one_by_an_address_that_means_something_there(monkeypatch):
    """Debian maps a host's own name to 127.0.1.1."""
    monkeypatch.setattr(ddp_setup, "_resolved", lambda name: "127.0.1.1")
    monkeypatch.setattr(ddp_setup, "_route_to", lambda host: "10.0.0.9")
    assert ddp_setup._own_address() == "10.0.0.9"


@pytest.mark.parametrize("local_world_size, host", [(1, "10.0.0.9"), (2, "127.0.1.1")])
def test_rank_0_is_where_other_hosts_reach_it_though_its_name_means_the_loopback(
        local_world_size, host, monkeypatch):
    monkeypatch.setattr(ddp_setup, "_own_address", lambda: "10.0.0.9")
    ddp = Ddp(world_size=2, local_world_size=local_world_size)
    assert ddp_setup._place_of_rank_0(ddp, {"MASTER_ADDR": "127.0.1.1"}).host == host


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_what_is_no_port_is_refused(port):
    ddp = Ddp(world_size=2, local_world_size=2, launcher="torchrun")
    with pytest.raises(SetupError, match=f"MASTER_PORT={port}"):
        ddp_setup._place_of_rank_0(ddp, {"MASTER_PORT": port})


def computed_port(launcher="Slurm step", **env):
    ddp = Ddp(world_size=2, local_world_size=2, launcher=launcher)
    return ddp_setup._place_of_rank_0(ddp, env).port


def test_ranks_of_one_launch_compute_the_same_port():
    assert computed_port(SLURM_JOB_ID="1") == computed_port(SLURM_JOB_ID="1")


@pytest.mark.parametrize("launcher, one, other", [
    ("Slurm step", dict(SLURM_STEP_ID="0"), dict(SLURM_STEP_ID="1")),
    # a step that has PMI's variables too
    ("MPICH or Intel MPI (Hydra)", dict(STEP), dict(STEP, SLURM_STEP_ID="1")),
    ("torchrun", dict(PBS_JOBID="7[1].pbs"), dict(PBS_JOBID="7[2].pbs")),    # of a job array
    ("torchrun", dict(TORCHELASTIC_RESTART_COUNT="0"), dict(TORCHELASTIC_RESTART_COUNT="1"))])
def test_another_launch_computes_another_port(launcher, one, other):
    assert computed_port(launcher, **one) != computed_port(launcher, **other)


ON_ONE_HOST = Place(rank=1, size=2, local_rank=1, local_size=2, nodes=1)


def port_of(env):
    return ddp_setup._place_of_rank_0(detect_launcher(env), env).port


def test_two_launches_of_mpich_on_one_host_compute_different_ports():
    """All ranks of a launch have inherited the same socket."""
    with socket.socket() as one, socket.socket() as other, one.dup() as inherited:
        ports = [port_of({**ON_ONE_HOST.hydra(), "HYDI_CONTROL_FD": str(held.fileno())})
                 for held in (one, inherited, other)]
    assert ports[0] == ports[1] != ports[2]


def test_two_launches_of_intel_mpi_on_one_host_compute_different_ports():
    ports = [port_of({**ON_ONE_HOST.hydra(), "I_MPI_HYDRA_UUID": name}) for name in "aab"]
    assert ports[0] == ports[1] != ports[2]


def test_ranks_of_one_launch_of_hydra_on_two_hosts_compute_the_same_port():
    """MPICH starts its processes on the hosts of a Slurm job by srun."""
    places = [Place(rank, 2, 0, 1) for rank in range(2)]
    with socket.socket() as one, socket.socket() as other:
        ports = [port_of({**place.slurm(), **place.hydra(),
                          "HYDI_CONTROL_FD": str(held.fileno())})
                 for place, held in zip(places, (one, other))]
    assert ports[0] == ports[1]


def test_no_other_program_gets_a_computed_port_by_asking_for_any():
    """Linux gives those from 32768 on."""
    ports = [computed_port(SLURM_JOB_ID=str(job)) for job in range(99)]
    assert min(ports) > 1024 and max(ports) < 32768


def test_a_name_of_both_kinds_means_the_address_of_ipv4():
    assert ddp_setup._resolved("localhost") == "127.0.0.1"


def test_equal_parts_give_equal_seeds_in_every_version():
    assert ddp_setup.seed_for(0, "rank", 1) == 3056358934300634472


def test_different_parts_give_different_seeds():
    parts = [(0,), (1,), ("1",), (1, 2), (12,), ("a", 1), ("a1",), (1, "a"), (-1,), (2**70,),
             ("1, 2",), ("1", "2")]
    seeds = [ddp_setup.seed_for(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_ranks_on_several_hosts_that_nobody_tells_where_rank_0_is_are_refused():
    ddp = Ddp(world_size=2, local_world_size=None, launcher="Open MPI")
    with pytest.raises(SetupError, match="MASTER_ADDR"):
        ddp_setup._place_of_rank_0(ddp, {})


def row(**changes):
    return {"host": "n0", "backend": "gloo", "torch": "2", "device": None, "problem": "",
            **changes}


@pytest.mark.parametrize("rows, code, words", [
    ({0: row(), 1: row()}, 0, ""),
    ({0: row(), 2: row(host="n1")}, 1, "1 of 3 .*rank.s. 1.*n0, n1"),
    ({0: row(problem="no"), 1: row(problem="no")}, 2, "^no$"),
    ({0: row(), 1: row(problem="no", host="n1")}, 2, "^rank 1 on n1: no$"),
    ({0: row(), 1: row(problem="no"), 2: row(problem="no")}, 2, "^rank 1, 2 on n0: no$"),
    ({0: row(device="cuda a"), 1: row(device="cuda a")}, 2, "ranks 0, 1 on n0"),
    ({0: row(device="cuda a"), 1: row(device="cuda a", host="n1")}, 0, ""),
    ({0: row(), 1: row(backend="nccl")}, 2, "backend: gloo, nccl"),
    ({0: row(), 1: row(torch="3")}, 2, "torch: 2, 3")])
def test_ranks_that_do_not_fit_together_are_refused(rows, code, words):
    problem, found = ddp_setup._problem_of(rows, max(rows) + 1, 300.0)
    assert found == code and bool(problem) == bool(code) and re.search(words, problem), problem


# ---------------------------------------------------------------- devices
@pytest.mark.parametrize("device, backend, local_rank, found, expected", [
    ("auto", "auto", 2, dict(backends=["gloo"]), ("cpu", "gloo")),
    ("auto", "auto", 2, dict(cuda=3, backends=["nccl", "gloo"]), ("cuda:2", "nccl")),
    # one visible per task
    ("auto", "auto", 3, dict(cuda=1, backends=["nccl", "gloo"]), ("cuda:0", "nccl")),
    ("auto", "auto", 11, dict(xpu=12, backends=["gloo", "xccl"]), ("xpu:11", "xccl")),
    ("auto", "auto", 11, dict(xpu=12, backends=["gloo", "ccl"]), ("xpu:11", "ccl")),
    ("cpu", "auto", 1, dict(cuda=4, backends=["nccl", "gloo"]), ("cpu", "gloo")),
    ("auto", "gloo", 1, dict(cuda=4, backends=["nccl", "gloo"]), ("cuda:1", "gloo")),
    # what torch 2.15 calls the nccl of before
    ("auto", "nccl-legacy", 1, dict(cuda=4, backends=["nccl", "nccl-legacy", "gloo"]),
     ("cuda:1", "nccl-legacy")),
    ("auto", "auto", 1, dict(cuda=4, backends=["nccl", "nccl-legacy", "gloo"]), ("cuda:1", "nccl")),
    ("auto", "auto", 1, dict(cuda=4, backends=["gloo"]), ("cuda:1", "gloo")),    # as on Windows
    ("auto", "ccl", 1, dict(backends=["gloo", "ccl"]), ("cpu", "ccl"))])
def test_device_and_backend(device, backend, local_rank, found, expected):
    chosen, name, reason = choose_device(device, backend, local_rank, found)
    assert (str(chosen), name) == expected
    assert expected[0] in reason and expected[1] in reason and f"device {device}" in reason


@pytest.mark.parametrize("device, backend, found, words", [
    ("cuda", "auto", dict(backends=["gloo"]), "cuda.*cpu, gloo"),
    ("auto", "nccl", dict(backends=["gloo"]), "nccl.*cpu"),
    ("cpu", "nccl", dict(cuda=1, backends=["nccl", "gloo"]), "nccl.*cpu"),
    ("cuda", "nccl-legacy", dict(cuda=1, backends=["nccl", "gloo"]), "nccl-legacy.*cuda"),
    ("xpu", "gloo", dict(xpu=1, backends=["gloo", "xccl"]), "gloo.*xpu.*1 xpu, gloo"),
    ("xpu", "auto", dict(xpu=1, backends=["gloo"]), "xpu"),
    ("cpu", "ccl", dict(backends=["gloo"]), "ccl.*cpu"),
    ("tpu", "auto", dict(backends=["gloo"]), "tpu.*cpu, gloo"),
    ("auto", "mpi", dict(backends=["gloo"]), "mpi.*cpu, gloo")])
def test_impossible_requests_are_refused_with_what_is_there(device, backend, found, words):
    with pytest.raises(SetupError, match=words):
        choose_device(device, backend, 0, found)


def test_the_best_backend_may_be_asked_for_by_the_name_of_the_device(monkeypatch):
    """As earlier scripts did."""
    monkeypatch.setattr(ddp_setup, "_found_devices", lambda *_: dict(xpu=2, backends=["xccl"]))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    ddp = ddp_setup._bind_device(Ddp(world_size=2, local_rank=1), "auto", "xpu")
    assert (str(ddp.device), ddp.backend) == ("xpu:1", "xccl")


def test_a_single_rank_needs_no_backend():
    assert choose_device("xpu", "auto", 0, dict(xpu=1, backends=[]), ranks=1)[0].type == "xpu"


def pretend(monkeypatch, backends=("gloo",), **modules):
    """A machine with XPUs, for choosing only: `modules` stand for Intel's packages, of which
    oneCCL's bindings register a backend. Returns the list of those imported, in order."""
    imported = []
    available = list(backends)
    real = builtins.__import__

    def pretended(name, *more):
        if name not in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
            return real(name, *more)
        imported.append(name)
        if name not in modules:
            raise ImportError(f"no {name} here")
        if name == "oneccl_bindings_for_pytorch":
            available.append("ccl")
        return modules[name]
    monkeypatch.setattr(builtins, "__import__", pretended)
    monkeypatch.setattr(torch.accelerator, "current_accelerator",
                        lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 12)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_backend_available", available.__contains__)
    return imported


def test_tiles_of_a_card_are_told_apart_by_mask_and_index(monkeypatch):
    names = []
    for mask, index in (("", 0), ("", 1), ("0.0", 0), ("0.1", 0), ("0.1", 0)):
        monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
        names.append(ddp_setup._device_id(torch.device("xpu", index)))
    assert len(set(names)) == 4 and names[3] == names[4]


def test_an_xpu_that_nothing_serves_is_refused_after_the_error_of_intels_bindings(
        monkeypatch, capsys):
    pretend(monkeypatch)
    with pytest.raises(SetupError, match="xpu"):
        choose_device("xpu", "auto", 0, ddp_setup._found_devices())
    said = "backend ccl is not usable: ImportError: no intel_extension_for_pytorch here\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("backends, backend, imported", [
    (["gloo", "xccl"], "xccl", []),
    (["gloo"], "ccl", ["intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"])])
def test_intels_bindings_serve_an_xpu_where_torch_has_no_xccl(
        backends, backend, imported, monkeypatch):
    order = pretend(monkeypatch, backends, oneccl_bindings_for_pytorch="bindings",
                    intel_extension_for_pytorch="extension")
    found = choose_device("auto", "auto", 0, ddp_setup._found_devices())
    assert (found[0].type, found[1], order) == ("xpu", backend, imported)


@pytest.mark.parametrize("mode, device, backend, fault, said", [
    ("auto", "xpu", "ccl", "", "IPEX 0 optimized the model"),
    ("on", "cpu", "gloo", "", "IPEX 0 optimized the model"),
    ("auto", "xpu", "xccl", "", ""), ("auto", "cpu", "gloo", "", ""), ("off", "xpu", "ccl", "", ""),
    ("auto", "xpu", "ccl", "no such\nmodel", "IPEX not used: AssertionError: no such"),
    ("auto", "xpu", "ccl", "1.2.3+xpu",
     "IPEX not used: ImportError: intel_extension_for_pytorch 1.2.3+xpu does not fit torch "
     f"{torch.__version__}")])
def test_ipex_optimizes_where_asked_or_where_torch_has_no_xccl_or_says_once_why_not(
        monkeypatch, capsys, mode, device, backend, fault, said):
    model = torch.nn.Linear(2, 2)
    theirs = (torch.nn.Linear(2, 2), "their optimizer")

    def optimize(given, **how):
        assert not fault, fault
        # without dtype: weights stay float32; unfused, or a step with a nan would not be skipped
        assert given is model and how == {"optimizer": "optimizer", "fuse_update_step": False}
        return theirs
    imported = pretend(monkeypatch, intel_extension_for_pytorch=types.SimpleNamespace(
        optimize=optimize, __version__="0"))
    if fault.endswith("xpu"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: fault)
    place = Ddp(device=torch.device(device), backend=backend)
    found = optimize_with_ipex(model, "optimizer", place, mode)
    assert found == (theirs if "optimized" in said else (model, "optimizer"))
    assert capsys.readouterr().out.splitlines() == [said] * bool(said)
    assert bool(imported) == (said != "" and not fault.endswith("xpu"))


# ---------------------------------------------------------------- samplers
def samplers(size, data=range(23), **options):
    return [ddp_sampler(data, Ddp(rank=r, world_size=size, seed=3), **options) for r in range(size)]


def dealt(size, epoch):
    """What the samplers of `size` ranks deal in training."""
    parts = samplers(size)
    for part in parts:
        part.set_epoch(epoch)
    return [list(part) for part in parts]


def test_in_training_one_process_deals_every_item_once_in_an_order_of_the_epoch():
    order, = dealt(1, epoch=2)
    assert sorted(order) == list(range(23)) != order
    assert dealt(1, epoch=3) != [order]


@pytest.mark.parametrize("size", [2, 3])
def test_in_training_ranks_deal_in_turn_what_one_process_does_with_as_many_steps_each(size):
    order, = dealt(1, epoch=2)
    steps = 23 // size
    assert dealt(size, epoch=2) == [order[rank:steps * size:size] for rank in range(size)]


def test_what_an_epoch_of_training_leaves_out_others_deal():
    """23 items on 4 ranks: 3 are left out in each."""
    seen = [set(itertools.chain(*dealt(4, epoch))) for epoch in range(10)]
    assert {len(items) for items in seen} == {20} and set.union(*seen) == set(range(23))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_evaluation_every_item_is_dealt_once(size):
    assert sorted(itertools.chain(*samplers(size, train=False))) == list(range(23))


def test_fewer_items_than_ranks_are_refused():
    with pytest.raises(ValueError, match="3 .*4 ranks"):
        samplers(4, range(3))


# ---------------------------------------------------------------- one process
@pytest.fixture
def no_launcher(monkeypatch):
    """This process has no variables of a launcher."""
    for name in clean_environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def plain_process(no_launcher):
    """The Ddp of a process that no launcher started."""
    ddp = setup_ddp(seed=0)
    yield ddp
    cleanup_ddp(ddp)


def test_one_process_needs_no_launcher(plain_process):
    assert (plain_process.rank, plain_process.world_size, plain_process.backend) == (0, 1, "none")
    assert (plain_process.launcher, plain_process.hosts) == ("none", (socket.gethostname(),))


def seeds():
    """A number from each generator that setup_ddp seeds."""
    return random.random(), torch.rand(1).item(), np.random.rand()


def test_a_second_set_up_seeds_anew_by_its_own_seed(no_launcher):
    """As a cell of a notebook that is changed, and run again."""
    drawn = []
    for seed in (0, 1, 0):
        assert setup_ddp(seed=seed, quiet=True).seed == seed
        drawn.append(seeds())
    assert drawn[0] == drawn[2] and not set(drawn[0]) & set(drawn[1])


def test_a_second_set_up_takes_its_own_arguments(no_launcher):
    assert setup_ddp(timeout=60.0, quiet=True).timeout == 60.0
    assert setup_ddp(timeout=90.0, quiet=True).timeout == 90.0
    with pytest.raises(SetupError, match="tpu"):
        setup_ddp("tpu")


def test_one_process_leaves_the_environment_as_it_was(no_launcher, capsys):
    """Libraries shall see a plain process."""
    before = dict(os.environ)
    ddp = setup_ddp(seed=0)
    assert dict(os.environ) == before
    cleanup_ddp(ddp)
    cleanup_ddp(ddp)    # harmless
    assert dict(os.environ) == before
    assert "Initialized DDP: 1 rank" in capsys.readouterr().out


def test_another_number_of_ranks_than_asked_for_is_refused(no_launcher, monkeypatch):
    with pytest.raises(SetupError, match="^ranks .* 2 .* 1 "):
        setup_ddp(ranks=2)
    monkeypatch.setenv("DDP_WORLD_SIZE", "4")
    with pytest.raises(SetupError, match="DDP_WORLD_SIZE .* 4 .* 1 "):
        setup_ddp()
    for name, value in Place(rank=0, local_rank=0).slurm().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match="DDP_WORLD_SIZE .* 4 .* 8 "):
        setup_ddp()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_to_wait_for_the_ranks_is_refused(seconds):
    with pytest.raises(SetupError, match=f"init_timeout.*{seconds}"):
        setup_ddp(init_timeout=seconds)


def test_an_abort_of_one_process_is_a_SystemExit_after_its_words(capsys):
    with pytest.raises(SystemExit) as caught:
        abort(Ddp(), "no such file", 2)
    assert (caught.value.code, capsys.readouterr().err) == (2, "no such file\n")


def test_one_process_wraps_no_model(plain_process):
    assert isinstance(wrap_ddp(torch.nn.Linear(2, 2), plain_process), torch.nn.Linear)


def test_a_model_on_another_device_is_refused(plain_process):
    with pytest.raises(ValueError, match="weight .* meta.* cpu"):
        wrap_ddp(torch.nn.Linear(2, 2, device="meta"), plain_process)


def test_one_process_agrees_with_itself():
    assert all_sum([1.5, 2], Ddp()) == [1.5, 2.0]
    assert all_mean(3, Ddp()) == 3.0
    assert broadcast({"a": [1, None]}, Ddp()) == {"a": [1, None]}
    assert gather({"a": [1, None]}, Ddp()) == [{"a": [1, None]}]


def test_one_process_misses_nobody():
    barrier(Ddp(), timeout=0.1)
    assert wait_for_ranks(Ddp(), limit=0.1) == []


def test_print0_takes_the_options_of_print(capsys):
    print0(Ddp(), "a", "b", sep="-", flush=False)
    assert capsys.readouterr().out == "a-b\n"


def test_print0_prints_on_rank_0_alone_unless_all_are_asked_to(capsys, monkeypatch):
    print0(Ddp(rank=1, world_size=2), "a")
    monkeypatch.setenv("DDP_LOG_ALL", "1")
    print0(Ddp(rank=1, world_size=2), "b")
    assert capsys.readouterr().out == "[rank 1] b\n"


# ---------------------------------------------------------------- python ddp_setup.py
@pytest.mark.parametrize("ranks, env, code, said", [
    (2, {}, 0, (f"torch {torch.__version__}", "launcher torchrun: rank 0 of 2", "device cpu",
                "backend gloo", " WORLD_SIZE=2")),
    (1, {"PMI_RANK": "1", "DDP_MPI4PY": "0"}, 1,
     ("PROBLEM: MPICH or Intel MPI (Hydra) started rank 1 but sets no number of ranks",
      "Seen: PMI_RANK=1"))])
def test_the_file_by_itself_shows_once_what_is_found_or_is_wrong(ranks, env, code, said, tmp_path):
    done = fork_ranks(ranks, [ddp_setup.__file__], tmp_path, env)
    assert done.returncode == code, done.text
    for words in said:
        assert done.text.count(words) == 1, (words, done.text)
