"""Does ddp_setup decide rightly? Pure decisions and one process."""
import builtins
import contextlib
import dataclasses
import importlib.metadata
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp_setup
from ddp_setup import (CannotPrint, CannotSave, Ddp, State, all_mean, all_sum, autocast, broadcast,
                       choose_device, choose_dtype, cleanup_ddp, ddp_sampler, detect_launcher,
                       end_watch, load_checkpoint, optimize_with_ipex, print0, save_checkpoint,
                       setup_ddp, slurm_first_host, start_watch, stop_reason, stop_wanted, wrap_ddp)
from launchers import await_that, clean_environment, fork_ranks

# What each launcher sets for rank 5 of 8, 4 per host, as documented or measured.
TORCHRUN = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", GROUP_RANK="1",
                MASTER_ADDR="n0", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none")
OPENMPI = dict(OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_LOCAL_RANK="1",
               OMPI_COMM_WORLD_LOCAL_SIZE="4", OMPI_COMM_WORLD_NODE_RANK="1",
               OMPI_UNIVERSE_SIZE="2", PMIX_RANK="5", PMIX_NAMESPACE="prterun-n0-17@1")
PALS_AURORA = dict(PALS_RANKID="5", PALS_LOCAL_RANKID="1", PALS_LOCAL_SIZE="4", PALS_NODEID="1",
                   PMIX_RANK="5", PMI_SIZE="")
PALS_POLARIS = dict(PALS_RANKID="5", PALS_LOCAL_RANKID="1", PALS_NODEID="1", PMI_RANK="5",
                    PMI_SIZE="8", PMI_LOCAL_RANK="1", PMI_LOCAL_SIZE="4")
HYDRA = dict(PMI_RANK="5", PMI_SIZE="8", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="4", PMI_FD="9")
MVAPICH2 = dict(MV2_COMM_WORLD_RANK="5", MV2_COMM_WORLD_SIZE="8", MV2_COMM_WORLD_LOCAL_RANK="1",
                MV2_COMM_WORLD_LOCAL_SIZE="4")
FLUX = dict(FLUX_TASK_RANK="5", FLUX_JOB_SIZE="8", FLUX_TASK_LOCAL_ID="1", FLUX_JOB_NNODES="2")
JSRUN = dict(JSM_NAMESPACE_RANK="5", JSM_NAMESPACE_SIZE="8", JSM_NAMESPACE_LOCAL_RANK="1")
BATCH_SHELL = dict(SLURM_JOB_ID="77", SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_LOCALID="0",
                   SLURM_NODEID="0", SLURM_TASKS_PER_NODE="4(x2)")
SLURM = dict(BATCH_SHELL, SLURM_STEP_ID="0", SLURM_PROCID="5", SLURM_STEP_NUM_TASKS="8",
             SLURM_NTASKS="16", SLURM_LOCALID="1", SLURM_NODEID="1",
             SLURM_STEP_TASKS_PER_NODE="4(x2)")


@pytest.mark.parametrize("env, name, mpi", [(*row, None) for row in (
    (dict(DDP_RANK="5", DDP_WORLD_SIZE="8", DDP_LOCAL_RANK="1"), "DDP_*"), (TORCHRUN, "torchrun"),
    (OPENMPI, "Open MPI"), (dict(PALS_AURORA, DDP_WORLD_SIZE="8"), "PALS"), (FLUX, "Flux"),
    (PALS_POLARIS, "PALS"), (HYDRA, "Hydra"), (MVAPICH2, "MVAPICH2"), (JSRUN, "jsrun"),
    (SLURM, "Slurm"),
    # nested and doubled sets: the innermost launcher decides
    ({**SLURM, "SLURM_PROCID": "1", **TORCHRUN}, "torchrun"),
    ({**BATCH_SHELL, **OPENMPI}, "Open MPI"), ({**SLURM, **PALS_POLARIS}, "PALS"),
    ({**OPENMPI, "DDP_RANK": "5", "DDP_WORLD_SIZE": "8", "DDP_LOCAL_RANK": "1"}, "DDP_*"),
    ({**OPENMPI, "RANK": "0", "WORLD_SIZE": "8"}, "Open MPI"))] + [
    (PALS_AURORA, "PALS", (5, 8))])    # mpi4py gives the size
def test_every_launcher_is_known_by_its_variables(env, name, mpi):
    place = detect_launcher(env, mpi)
    assert name in place.launcher
    assert (place.rank, place.world_size, place.local_rank) == (5, 8, 1)
    assert place.local_world_size in (4, None)


def test_a_slurm_step_is_on_one_host_if_it_says_that_it_has_one_node():
    assert detect_launcher(dict(SLURM, SLURM_STEP_NUM_NODES="1")).on_one_host
    assert not detect_launcher(SLURM).on_one_host


def test_a_single_rank_of_a_launcher_is_on_one_host():
    one = detect_launcher(dict(FLUX, FLUX_TASK_RANK="0", FLUX_JOB_SIZE="1", FLUX_TASK_LOCAL_ID="0"))
    assert (one.world_size, one.local_world_size, one.node_rank) == (1, 1, 0)   # it meets nobody


@pytest.mark.parametrize("env", [
    {"RANK": "3", "WORLD_SIZE": "4"}, {"PALS_LOCAL_RANKID": "0"}, {"DDP_WORLD_SIZE": "4"},
    BATCH_SHELL, dict(SLURM, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")])
def test_what_no_launcher_started_is_one_process(env):
    place = detect_launcher(env)
    assert (place.rank, place.world_size, place.local_rank) == (0, 1, 0)
    hint = "8 tasks, and this is ONE process in its shell. To start all: srun python"
    assert (hint in " ".join(place.notes)) == (env is BATCH_SHELL)


@pytest.mark.parametrize("env, mpi, words", [
    ({k: v for k, v in OPENMPI.items() if k != "OMPI_COMM_WORLD_SIZE"}, None,
     ("OMPI_COMM_WORLD_RANK=5", "no set")),
    ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, None, ("RANK=1", "no set")),
    ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, None, ("RANK=1", "no set")),
    (dict(OPENMPI, WORLD_SIZE="4"), None, ("WORLD_SIZE says 4", "OMPI_COMM_WORLD_SIZE says 8")),
    (dict(HYDRA, DDP_WORLD_SIZE="4"), None, ("DDP_WORLD_SIZE says 4", "PMI_SIZE says 8")),
    (HYDRA, (0, 1), ("mpi4py says 1", "PMI_SIZE says 8", "built for another MPI")),
    (PALS_AURORA, None, ("DDP_WORLD_SIZE", "no number of ranks")),
    ({**OPENMPI, **TORCHRUN, "TORCHELASTIC_RUN_ID": "", "WORLD_SIZE": "4", "RANK": "0"}, None,
     ("WORLD_SIZE says 4", "Open MPI says 8")),
    (dict(HYDRA, PMI_RANK="8"), None, ("rank 8 is outside 0 to 7",)),
    (dict(TORCHRUN, WORLD_SIZE="99999999999"), None, ("found 99999999999 ranks",)),
    (dict(HYDRA, PMI_SIZE="eight"), None, ("PMI_SIZE='eight'", "not an integer"))])
def test_contradictions_are_refused_and_shown(env, mpi, words):
    with pytest.raises(RuntimeError) as e:
        detect_launcher(env, mpi)
    assert all(word in str(e.value) for word in words), str(e.value)


def test_first_host_of_a_slurm_list():
    for text, host in (("n1,n2", "n1"), ("a[003-5,9]-ib,b3", "a003-ib"),
                       ("r[07-10]n[1-4]", "r07n1"), ("x-1-[12,14-16]", "x-1-12")):
        assert slurm_first_host(text) == host


def test_ranks_on_one_host_ask_no_name_service(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name: pytest.fail(f"asked for {name}"))
    alone = Ddp(world_size=2, local_world_size=2)
    for env in ({"MASTER_ADDR": "n0"}, {}):
        ddp_setup._place_of_rank_0(dataclasses.replace(alone, launcher="torchrun"), env)


PLACES = {"n0": ["10.0.0.1"], "self": ["127.0.1.1"], "six": ["fd00::1"],
          socket.gethostname(): ["10.0.0.9"]}
MPI = object()


@pytest.mark.parametrize("launcher, per_host, mpi, env, place", [
    ("torchrun", 2, None, dict(MASTER_ADDR="127.0.0.5"), ("127.0.0.5", 29500, "from MASTER_ADDR")),
    ("torchrun", 2, None, dict(MASTER_PORT="7"), ("127.0.0.1", 7, "from MASTER_PORT")),
    ("torchrun", 2, None, dict(MASTER_ADDR="n0", MASTER_PORT="7"), ("n0", 7, "from MASTER_ADDR")),
    # a name that means 127.0.1.1 here, as on Debian, is of no use to other hosts
    ("torchrun", 1, None, dict(MASTER_ADDR="self"), ("10.0.0.9", 29500, "from MASTER_ADDR")),
    ("torchrun", 1, None, dict(MASTER_ADDR="six"), ("six", 29500, "from MASTER_ADDR")),
    ("Slurm step", None, None, dict(SLURM_STEP_NODELIST="n[0-3]", MASTER_PORT="7"),
     ("n0", 7, "from MASTER_PORT")),
    ("Open MPI", 2, MPI, {}, ("127.0.0.1", 0, "by MPI broadcast")),
    ("Open MPI", None, MPI, {}, ("10.0.0.9", 0, "by MPI broadcast")),
    ("Open MPI", None, MPI, dict(MASTER_PORT="7"),
     ("10.0.0.9", 7, "from MASTER_PORT by MPI broadcast")),
    ("Open MPI", None, MPI, dict(MASTER_ADDR="n0"),
     ("n0", 29500, "from MASTER_ADDR by MPI broadcast"))])
def test_the_place_of_rank_0(launcher, per_host, mpi, env, place, monkeypatch):
    monkeypatch.setattr(ddp_setup, "_addresses", lambda name: PLACES.get(name, []))
    ddp = Ddp(world_size=2, local_world_size=per_host, launcher=launcher, state=State(mpi=mpi))
    assert ddp_setup._place_of_rank_0(ddp, env) == place


@pytest.mark.parametrize("addresses, seen", [
    (["127.0.1.1", "10.0.0.9", "fd00::9"], "10.0.0.9"),
    (["127.0.1.1", "::1", "fd00::9"], "fd00::9"),
    (["fe80::9%eth0", "fd00::9"], "fd00::9")])
def test_other_hosts_reach_this_one_by_an_address_that_means_something_there(
        addresses, seen, monkeypatch):
    monkeypatch.setattr(ddp_setup, "_addresses", lambda name: addresses)
    assert ddp_setup._own_address() == seen


def test_the_way_to_a_host_that_all_reach_tells_the_own_address(monkeypatch):
    known = {"all know me": ["127.0.0.1"]}
    monkeypatch.setattr(ddp_setup, "_addresses", lambda name: known.get(name, []))
    monkeypatch.setattr(ddp_setup, "_is_local", lambda ip: False)
    assert ddp_setup._own_address(way_to="all know me") == "127.0.0.1"


def test_the_interface_of_an_address_of_ipv6_is_found():
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here, or no Linux")
    assert ddp_setup._interface_of("::1") == "lo"


def test_where_a_name_means_an_address_of_ipv6_alone_it_tells_the_own_one(ipv6):
    assert ddp_setup._resolve("::1") == "::1" == ddp_setup._route_to("::1")


STRANGER = ddp_setup.SetupError("held by a stranger")


def test_ranks_meet_at_an_address_of_ipv6(ipv6):
    listener = ddp_setup._listen(ddp_setup.Address("::1", 0, ""))
    address = ddp_setup.Address("::1", listener.getsockname()[1], "")
    store = torch.distributed.TCPStore(*address[:2], None, True, wait_for_workers=False,
                                       master_listen_fd=listener.detach())
    store.set("served", "")
    ddp_setup._await_listener(Ddp(), address, 30, STRANGER)
    assert ddp_setup._connect(address, 30, "served", STRANGER).check(["served"])


def listen_silently(port):
    return socket.create_server(("127.0.0.1", port))


def close_at_once(port):
    """A socket whose connections end at once, by a thread that ends with the socket."""
    server = listen_silently(port)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()
    threading.Thread(target=accept, daemon=True).start()
    return server


def test_a_program_that_ends_a_connection_is_never_taken_for_rank_0():
    with close_at_once(0) as server:
        address = ddp_setup.Address(*server.getsockname(), "")
        with pytest.raises(ddp_setup.SetupError, match="held by a stranger"):
            ddp_setup._await_listener(Ddp(), address, 0.5, STRANGER)
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("stranger", [listen_silently, close_at_once])
def test_a_program_that_is_no_store_is_told_from_rank_0(stranger):
    with stranger(0) as server:
        address = ddp_setup.Address(*server.getsockname(), "")
        with pytest.raises(ddp_setup.SetupError, match="held by a stranger"):
            ddp_setup._await_listener(Ddp(), address, 0.5, STRANGER)
            ddp_setup._connect(address, 0.5, "", STRANGER)
        if stranger is close_at_once:
            server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def store():
    """A store that holds the key "served"."""
    opened = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    opened.set("served", "")
    return opened


def test_the_store_of_another_run_is_told_from_that_of_rank_0(store):
    address = ddp_setup.Address("127.0.0.1", store.port, "")
    with pytest.raises(ddp_setup.SetupError, match="held by a stranger"):
        ddp_setup._connect(address, 0.5, "ddp/another launch/served", STRANGER)


def test_the_store_of_rank_0_is_known_by_its_first_word(store):
    address = ddp_setup.Address("127.0.0.1", store.port, "")
    assert ddp_setup._connect(address, 30, "served", STRANGER).check(["served"])


@pytest.mark.parametrize("given, advice", [
    ((), "Export MASTER_PORT=<a free port>"), (("MASTER_PORT",), "Leave MASTER_PORT unset"),
    (("MASTER_ADDR", "MASTER_PORT"), "Leave both unset")])
def test_of_a_place_that_is_taken_the_advice_names_what_was_set(given, advice):
    assert advice in ddp_setup._other_place(dict.fromkeys(given, "7"))


def test_ranks_of_one_launch_compute_the_same_port_and_those_of_another_launch_another():
    def port(**env):
        ddp = Ddp(world_size=2, local_world_size=2, launcher="Slurm step")
        return ddp_setup._place_of_rank_0(ddp, env).port
    assert port(SLURM_JOB_ID="1", SLURM_STEP_ID="0") == port(SLURM_JOB_ID="1", SLURM_STEP_ID="0")
    assert port(SLURM_JOB_ID="1", SLURM_STEP_ID="0") != port(SLURM_JOB_ID="1", SLURM_STEP_ID="1")


def test_no_other_program_gets_a_computed_port_by_asking_for_any():
    """Linux gives those from 32768 on."""
    ddp = Ddp(world_size=2, local_world_size=2, launcher="Slurm step")
    ports = [ddp_setup._place_of_rank_0(ddp, {"SLURM_JOB_ID": str(job)}).port for job in range(99)]
    assert min(ports) > 1024 and max(ports) < 32768


def test_a_name_of_both_kinds_means_the_address_of_ipv4(monkeypatch):
    def both(*_, **options):
        return [(family, socket.SOCK_STREAM, 6, "", (ip, 0)) for family, ip in (
            (socket.AF_INET6, "fd00::9"), (socket.AF_INET, "10.0.0.9"))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert ddp_setup._resolve("n0") == "10.0.0.9"


def test_equal_parts_give_equal_seeds_in_every_version():
    assert ddp_setup.seed_for(0, "rank", 1) == 3056358934300634472


def test_ranks_on_several_hosts_that_nobody_tells_where_rank_0_is_are_refused():
    ddp = Ddp(world_size=2, local_world_size=None, launcher="Open MPI")
    with pytest.raises(ddp_setup.SetupError, match="nothing tells them where rank 0 is"):
        ddp_setup._place_of_rank_0(ddp, {})


FOUND = dict(cuda=0, xpu=0, nccl=False, gloo=True, xccl=False, ccl=False)


@pytest.mark.parametrize("device, backend, local_rank, found, expected", [
    ("auto", "auto", 2, {}, ("cpu", None, "gloo")),
    ("auto", "auto", 2, dict(xpu=1, cuda=3, nccl=True), ("cuda", 2, "nccl")),
    ("auto", "auto", 3, dict(cuda=1, nccl=True), ("cuda", 0, "nccl")),    # one visible per task
    ("auto", "auto", 11, dict(xpu=12, ccl=True), ("xpu", 11, "ccl")),
    ("auto", "xpu", 0, dict(xpu=12, xccl=True, ccl=True), ("xpu", 0, "xccl")),
    ("cpu", "auto", 1, dict(cuda=4, nccl=True), ("cpu", None, "gloo")),
    ("auto", "gloo", 1, dict(cuda=4, nccl=True), ("cuda", 1, "gloo")),
    ("auto", "ccl", 1, dict(ccl=True), ("cpu", None, "ccl"))])
def test_device_and_backend(device, backend, local_rank, found, expected):
    assert choose_device(device, backend, local_rank, {**FOUND, **found})[:3] == expected


@pytest.mark.parametrize("device, backend, found", [
    ("cuda", "auto", {}), ("auto", "nccl", {}), ("auto", "xpu", {}), ("tpu", "auto", {}),
    ("cpu", "nccl", dict(cuda=1, nccl=True)), ("xpu", "gloo", dict(xpu=1, xccl=True)),
    ("xpu", "auto", dict(xpu=1)), ("cpu", "ccl", {}), ("auto", "mpi", {})])
def test_impossible_requests_are_refused_with_what_is_there(device, backend, found):
    with pytest.raises(RuntimeError, match="[Aa]vailable|expected one of"):
        choose_device(device, backend, 0, {**FOUND, **found})


def row(**changes):
    return {"host": "n0", "backend": "gloo", "torch": "2", "device": None, "error": None, **changes}


@pytest.mark.parametrize("rows, code, words", [
    ({0: row(), 1: row()}, 0, ""),
    ({0: row(), 2: row(host="n1")}, 1, "1 of 3 ranks did not appear.*rank.s. 1.*n0, n1"),
    ({0: row(error="no"), 1: row(error="no")}, 2, "^no$"),
    ({0: row(), 1: row(error="no", host="n1")}, 2, "^rank 1 on n1: no$"),
    ({0: row(device="cuda a"), 1: row(device="cuda a")}, 2, "ranks 0, 1 on n0 share one accel"),
    ({0: row(device="cuda a"), 1: row(device="cuda a", host="n1")}, 0, ""),
    ({0: row(), 1: row(backend="nccl")}, 2, "differ in backend: gloo, nccl"),
    ({0: row(), 1: row(torch="3")}, 2, "differ in torch: 2, 3")])
def test_ranks_that_do_not_fit_together_are_refused(rows, code, words):
    problem, found = ddp_setup._problem_of(rows, max(rows) + 1, 300.0)
    assert found == code and bool(problem) == bool(code) and re.search(words, problem), problem


def pretend(monkeypatch, xccl=False, **modules):
    """A machine with XPUs, for choosing only: `modules` stand for Intel's packages. Returns the
    list of those imported, in order."""
    imported = []
    real = builtins.__import__

    def pretended(name, *more):
        if name not in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
            return real(name, *more)
        imported.append(name)
        if name not in modules:
            raise ImportError(f"no {name} here")
        return modules[name]
    monkeypatch.setattr(builtins, "__import__", pretended)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 12)
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: xccl)
    return imported


def test_tiles_of_a_card_that_share_a_uuid_are_told_apart_and_two_ranks_on_one_are_not(monkeypatch):
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: types.SimpleNamespace(uuid=7))
    names = []
    for mask, index in (("", 0), ("", 1), ("0.0", 0), ("0.1", 0), ("0.1", 0)):
        monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
        names.append(ddp_setup._device_id(torch.device("xpu", index)))
    assert len(set(names)) == 4 and names[3] == names[4]


def test_a_guard_that_does_not_read_holds_up_no_step():
    ours, guards = socket.socketpair()
    ours.settimeout(ddp_setup.GUARD_ANSWER)
    with ours, guards:
        ddp = Ddp(state=State(guard=ours))
        ddp.state.watch = ddp_setup.Watch(limit=0.0, stop_file="")
        ddp_setup.note_progress(ddp, step=4)
        ddp_setup.note_progress(ddp)   # between steps
        assert guards.recv(1000) == b'{"step": 4}\n' * 2
        with contextlib.suppress(BlockingIOError):
            while True:   # until it is full
                os.write(ours.fileno(), b"x" * 4096)
        began = time.monotonic()
        ddp_setup.note_progress(ddp, step=5)
        assert time.monotonic() - began < ddp_setup.GUARD_ANSWER / 2


def test_an_xpu_that_nothing_serves_is_refused_with_the_error_of_intels_bindings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pretend(monkeypatch)
    with pytest.raises(ddp_setup.SetupError,
                       match="no backend for xpu.*ImportError: no oneccl_bindings_for_pytorch"):
        choose_device("xpu", "auto", 0, ddp_setup._found_devices())


@pytest.mark.parametrize("xccl, backend, imported", [
    (True, "xccl", []),
    (False, "ccl", ["intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"])])
def test_intels_bindings_serve_an_xpu_where_torch_has_no_xccl(xccl, backend, imported, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    order = pretend(monkeypatch, xccl, oneccl_bindings_for_pytorch="bindings")
    found = choose_device("auto", "auto", 0, ddp_setup._found_devices())
    assert (found[0], found[2], order) == ("xpu", backend, imported)


@pytest.mark.parametrize("mode, device, xccl, fault, said", [
    ("auto", "xpu", False, "", "IPEX 0 optimized the model"),
    ("on", "cpu", False, "", "IPEX 0 optimized the model"),
    ("auto", "xpu", True, "", ""), ("auto", "cpu", False, "", ""), ("off", "xpu", False, "", ""),
    ("auto", "xpu", False, "no such\nmodel", "IPEX not used: AssertionError: no such"),
    ("auto", "xpu", False, "1.2.3+xpu",
     "IPEX not used: ImportError: intel_extension_for_pytorch 1.2.3+xpu does not fit torch "
     f"{torch.__version__}")])
def test_ipex_optimizes_where_asked_or_where_torch_has_no_xccl_or_says_once_why_not(
        monkeypatch, capsys, mode, device, xccl, fault, said):
    model = torch.nn.Linear(2, 2)
    theirs = (torch.nn.Linear(2, 2), "their optimizer")

    def optimize(given, **how):
        assert not fault, fault
        # without dtype: weights stay float32; unfused, or a step with a nan would not be skipped
        assert given is model and how == {"optimizer": "optimizer", "fuse_update_step": False}
        return theirs
    imported = pretend(monkeypatch, xccl, intel_extension_for_pytorch=types.SimpleNamespace(
        optimize=optimize, __version__="0"))
    if fault.endswith("xpu"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: fault)
    place = Ddp(device=torch.device(device), state=State(ipex=mode))
    found = optimize_with_ipex(model, "optimizer", place)
    assert found == (theirs if "optimized" in said else (model, "optimizer"))
    assert capsys.readouterr().out.splitlines() == [said] * bool(said)
    assert bool(imported) == (said != "" and not fault.endswith("xpu"))


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


@pytest.mark.parametrize("size", [2, 3])
def test_in_evaluation_every_item_is_dealt_once(size):
    assert sorted(itertools.chain(*samplers(size, train=False))) == list(range(23))


def test_fewer_items_than_ranks_are_refused():
    with pytest.raises(ValueError, match="3 item.*4 ranks"):
        samplers(4, range(3))


@pytest.mark.parametrize("request_, dtypes", [
    (False, {torch.float32}), ("float32", {torch.float32}), ("bfloat16", {torch.bfloat16}),
    (True, {torch.bfloat16, torch.float32})])    # as the CPU can
def test_a_cpu_computes_in_the_precision_asked_for(request_, dtypes):
    assert choose_dtype(request_, torch.device("cpu"))[0] in dtypes


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="float8.*expected"):
        choose_dtype("float8", torch.device("cpu"))


def test_autocast_computes_in_bfloat16():
    with autocast(torch.bfloat16, Ddp()):
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_of_float32_is_none():
    with autocast(torch.float32, Ddp()):
        assert not torch.is_autocast_enabled("cpu")


def test_a_checkpoint_holds_what_was_given_and_of_what_it_was_made(tmp_path):
    path = tmp_path / "a" / "b.pt"
    save_checkpoint(path, Ddp(), model={"w": torch.ones(3)}, epoch=4, names=["x", None], rate=0.5)
    state = torch.load(path, weights_only=True)
    assert state["model"]["w"].tolist() == [1.0] * 3 and state["names"] == ["x", None]
    assert (state["epoch"], state["rate"], state["world_size"]) == (4, 0.5, 1)
    assert state["versions"]["torch"] == str(torch.__version__)
    assert os.listdir(tmp_path / "a") == ["b.pt"]


def test_a_save_to_a_full_disk_leaves_the_checkpoint_of_before_and_nothing_else(
        tmp_path, monkeypatch):
    path = tmp_path / "b.pt"
    save_checkpoint(path, Ddp(), model={"w": torch.ones(3)})
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RuntimeError, match="No space left"):
        save_checkpoint(path, Ddp(), model={"w": torch.zeros(3)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["b.pt"]


def test_a_full_disk_is_told_with_the_room_that_a_checkpoint_needs(tmp_path):
    (tmp_path / ".b.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(CannotSave, match="no space is left .*needs about 4.0 MB, .* MB are free"):
        save_checkpoint(tmp_path / "b.pt", Ddp(), state=[{"w": torch.zeros(1_000_000)}])


def test_a_full_disk_is_not_answered_by_the_same_command(tmp_path):
    (tmp_path / ".b.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(CannotSave) as caught:
        save_checkpoint(tmp_path / "b.pt", Ddp(), step=3)
    assert caught.value.retry is False


@pytest.mark.parametrize("resumes", [True, False])
def test_only_a_checkpoint_that_a_start_continues_from_is_told_as_the_last(resumes, tmp_path):
    ddp = Ddp()
    save_checkpoint(str(tmp_path / "b.pt"), ddp, resumes=resumes, step=3)
    assert ddp.state.checkpoint == (str(tmp_path / "b.pt") if resumes else "")


def test_a_checkpoint_is_not_passed_over_for_want_of_memory(tmp_path, monkeypatch):
    def no_memory(*_, **options):
        raise MemoryError

    path = tmp_path / "last.pt"
    for step in (1, 2):
        save_checkpoint(path, Ddp(), keep_last=2, step=step)
    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(MemoryError):
        load_checkpoint(path, Ddp())


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, disk_calls):
    path = tmp_path / "b.pt"
    save_checkpoint(path, Ddp(), step=3)
    assert disk_calls[:2] == [("fsync", path.read_bytes()), ("rename", path)]


def test_a_checkpoint_has_its_name_on_the_disk_when_the_call_returns(tmp_path, disk_calls):
    save_checkpoint(tmp_path / "b.pt", Ddp(), step=3)
    assert disk_calls[-1] == ("fsync", tmp_path)


@pytest.mark.parametrize("thing", [object(), np.float64(1.0), len, lambda: None],
                         ids=["object", "numpy", "function", "lambda"])
def test_a_value_that_torch_would_not_load_again_is_not_saved(thing, tmp_path):
    with pytest.raises(RuntimeError, match="cannot write .*(it holds builtins|numpy|lambda)"):
        save_checkpoint(tmp_path / "b.pt", Ddp(), deep=[{"thing": thing}])
    assert os.listdir(tmp_path) == []


@pytest.fixture
def plain_process(monkeypatch):
    """The Ddp of a process that no launcher started."""
    for name in clean_environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    ddp = setup_ddp(seed=0)
    yield ddp
    cleanup_ddp(ddp)


def test_one_process_needs_no_launcher(plain_process, capsys):
    assert (plain_process.rank, plain_process.world_size, plain_process.backend) == (0, 1, "none")


def test_a_second_set_up_gives_the_same_place(plain_process):
    assert setup_ddp() is plain_process


def test_one_process_leaves_the_environment_as_it_was(monkeypatch, capsys):
    """Libraries shall see a plain process."""
    for name in clean_environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    ddp = setup_ddp(seed=0)
    assert dict(os.environ) == before
    cleanup_ddp(ddp)
    cleanup_ddp(ddp)    # harmless
    assert dict(os.environ) == before
    assert "Initialized DDP: 1 rank" in capsys.readouterr().out


def test_one_process_wraps_no_model(plain_process):
    assert isinstance(wrap_ddp(torch.nn.Linear(2, 2), plain_process), torch.nn.Linear)


def test_a_model_on_another_device_is_refused(plain_process):
    with pytest.raises(ValueError, match="weight is on meta; expected cpu"):
        wrap_ddp(torch.nn.Linear(2, 2, device="meta"), plain_process)


def test_one_process_agrees_with_itself():
    assert all_sum([1.5, 2], Ddp()) == [1.5, 2.0]
    assert all_mean(3, Ddp()) == 3.0
    assert broadcast({"a": [1, None]}, Ddp()) == {"a": [1, None]}


def test_print0_names_an_output_that_is_full(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(CannotPrint):
            print0(Ddp(), "a")


def test_print0_takes_the_options_of_print(capsys):
    print0(Ddp(), "a", "b", sep="-", flush=False)
    assert capsys.readouterr().out == "a-b\n"


# ---------------------------------------------------------------- checkpoints that survive
def flip_a_bit(path):
    """Flip one bit in the middle of the largest record of the zip file that torch writes."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as z:
        record = max(z.infolist(), key=lambda record: record.file_size)
    data[record.header_offset + record.file_size // 2] ^= 16    # headers are short
    path.write_bytes(data)


def test_former_checkpoints_are_kept_and_one_is_whole_under_some_name_at_any_moment(
        tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    seen = []
    replace = os.replace

    def watched(old, new):
        replace(old, new)
        seen.append([load_checkpoint(str(p))["step"] for p in sorted(tmp_path.glob("last*.pt"))])

    monkeypatch.setattr(os, "replace", watched)
    for step in (1, 2, 3, 4):
        save_checkpoint(str(path), Ddp(), keep_last=3, step=step)
    assert seen == [[1], [1], [1, 2], [1, 2], [2, 1], [2, 1, 3], [2, 3], [3, 2], [3, 2, 4]]
    # of last-1.pt, last-2.pt, last.pt, as far as they are there
    save_checkpoint(str(path), Ddp(), keep_last=10**12, step=5)
    assert load_checkpoint(str(tmp_path / "last-3.pt"))["step"] == 2


def two_checkpoints_of_which_the_newer_is_damaged(folder):
    """(a function that saves a step, the newer, the former). A bit is flipped, so that torch loads
    it without a word."""
    path = folder / "last.pt"

    def save(step, ddp):
        save_checkpoint(path, ddp, keep_last=2, step=step, weight=torch.zeros(9000))
    save(1, Ddp())
    save(2, Ddp())
    flip_a_bit(path)
    assert torch.load(path, weights_only=True)["weight"].count_nonzero() == 1
    return save, path, folder / "last-1.pt"


def test_a_flipped_bit_is_told_and_the_former_checkpoint_is_used(tmp_path, capsys):
    _, path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    ddp = Ddp()
    assert load_checkpoint(path, ddp)["step"] == 1 and ddp.state.checkpoint == str(former)
    said = capsys.readouterr().out
    assert "last.pt: it is damaged" in said and f"Going back to {former}" in said


def test_the_next_save_replaces_a_damaged_checkpoint_and_no_other(tmp_path):
    save, path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    ddp = Ddp()
    load_checkpoint(path, ddp)
    save_checkpoint(tmp_path / "best.pt", ddp, step=2)
    save(3, ddp)
    assert [load_checkpoint(file)["step"] for file in (former, path)] == [1, 3]


def test_where_no_checkpoint_is_whole_each_is_named_with_what_is_wrong(tmp_path):
    _, path, former = two_checkpoints_of_which_the_newer_is_damaged(tmp_path)
    former.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="(?s)last.pt: it is damaged, the checksum of its record "
                                         ".*data/0.*cannot read the checkpoint .*last-1.pt"):
        load_checkpoint(path, Ddp())


def test_a_checkpoint_that_is_cut_off_is_refused_with_its_name(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, Ddp(), weight=torch.arange(100.0))
    data = path.read_bytes()
    for length in range(0, len(data), 61):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=f"cannot read the checkpoint {path}"):
            load_checkpoint(path)


def test_a_file_with_code_is_refused_without_torchs_advice_to_load_it_all_the_same(tmp_path):
    torch.save(print, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="Weights only load failed. Expected a file written by"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("name, reason", [
    ("none.pt", "No such file or directory"), ("", "Is a directory")])
def test_what_is_no_file_is_refused_with_its_name(name, reason, tmp_path):
    with pytest.raises(ValueError, match=f"no checkpoint {tmp_path / name}: {reason}"):
        load_checkpoint(tmp_path / name)


# ---------------------------------------------------------------- stop requests
def test_without_a_request_there_is_no_reason_to_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", str(time.time() + 3600))
    ddp = Ddp()
    assert stop_reason(ddp, 3, stop_file=str(tmp_path / "STOP")) == ""
    end_watch(ddp)


def test_a_deadline_that_has_passed_asks_for_a_stop(monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", str(time.time() - 1))
    ddp = Ddp()
    assert stop_reason(ddp, 3) == "DDP_DEADLINE is reached"
    end_watch(ddp)


@pytest.mark.parametrize("text", ["soon", "nan", "-60", "3000"])
def test_a_deadline_that_is_no_time_is_refused_before_the_ranks_meet(text, monkeypatch):
    monkeypatch.setenv("DDP_DEADLINE", text)
    with pytest.raises(RuntimeError, match=f"DDP_DEADLINE='{text}' is not a time"):
        setup_ddp()


def test_a_stop_file_is_looked_for_where_it_was_named_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ddp = Ddp()
    assert stop_reason(ddp, 3, stop_file="STOP") == ""
    (tmp_path / "STOP").touch()
    monkeypatch.chdir("/")
    expected = f"{tmp_path}/STOP exists; remove it before the next start"
    assert stop_reason(ddp, 4, stop_file="STOP") == expected
    end_watch(ddp)


def test_the_end_waits_for_other_ranks_as_long_as_the_watch_would():
    ddp = Ddp()
    start_watch(ddp, minutes=3)
    end_watch(ddp)
    assert ddp.state.patience == 180


def test_a_new_watch_knows_of_a_request_to_the_one_before():
    ddp = Ddp()
    start_watch(ddp)
    ddp.state.watch.requested = "SIGTERM"
    start_watch(ddp)
    assert stop_wanted(ddp) == 1.0
    end_watch(ddp)


def test_a_watch_leaves_the_handlers_as_they_were_and_no_thread():
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    ddp = Ddp()
    stop_reason(ddp, 0)
    os.kill(os.getpid(), signal.SIGTERM)
    await_that(lambda: stop_wanted(ddp), 60, lambda: "SIGTERM was not noticed")
    assert stop_reason(ddp, 1).startswith("SIGTERM on rank 0")
    end_watch(ddp)
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == (before, threads)


# ---------------------------------------------------------------- --doctor
def test_the_doctor_lists_all_variables_that_are_read(capsys):
    assert ddp_setup._main(["--doctor", "--help"]) == 0
    said = capsys.readouterr().out
    code = Path(ddp_setup.__file__).read_text()
    for name in {*re.findall(r'env(?:iron)?\.get\("(\w+)"', code), "RANK", "PMI_RANK"}:
        assert name in said or name.startswith(("SLURM_", "TORCHELASTIC_")), name


def test_without_an_option_the_file_tells_its_usage(capsys):
    assert "--doctor [--help]" in ddp_setup._main([])


@pytest.mark.parametrize("ranks, env, code, said", [
    (2, {}, 0, (f"torch {torch.__version__}, numpy ", "gloo True", "rank from RANK", "rank 0 of 2",
                "device cpu", "backend gloo", "MASTER_ADDR: 127.0.0.1 is 127.0.0.1",
                " WORLD_SIZE=2")),
    (1, {"MASTER_ADDR": "no-such-host.invalid", "PMI_RANK": "1"}, 1,
     ("PROBLEM: a launcher seems to have started", "no set of its variables is complete",
      "PROBLEM: MASTER_ADDR=no-such-host.invalid cannot be resolved"))])
def test_the_doctor_shows_once_what_was_found_and_what_is_wrong(ranks, env, code, said, tmp_path):
    done = fork_ranks(ranks, [ddp_setup.__file__, "--doctor"], tmp_path, env)
    assert (done.returncode, done.stderr) == (code, ""), done.text
    for words in said:
        assert done.stdout.count(words) == 1, (words, done.text)


def test_a_device_is_no_checkpoint(tmp_path):
    (tmp_path / "last.pt").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="it is no file"):
        load_checkpoint(tmp_path / "last.pt")


def test_a_file_that_unpacks_to_more_than_its_bytes_is_no_checkpoint(packed):
    with pytest.raises(ValueError, match="and unpacks to 10,000"):
        load_checkpoint(packed)


@pytest.mark.parametrize("env, own, given, bound", [
    ({"OMP_PROC_BIND": "close"}, {2}, {0, 1, 2, 3}, [2]),
    ({"OMP_PLACES": "cores"}, {6, 2}, {0, 2, 6}, [2, 6]),      # two threads of a core
    ({"OMP_PROC_BIND": "close"}, {2}, {2}, [2]),               # the launcher was bound before
    ({"OMP_PROC_BIND": "close"}, {2}, None, [2]),
    ({"OMP_PROC_BIND": "close"}, {0, 1}, None, []), ({}, {2}, {0, 1, 2, 3}, []),
    ({"OMP_PROC_BIND": "false"}, {0, 1}, {0, 1}, [])])
def test_the_cores_to_which_openmp_has_bound_a_process(env, own, given, bound):
    assert ddp_setup._bound_by_openmp(env, own, given) == bound


@pytest.mark.parametrize("places, told", [
    ([("a", [0]), ("a", [0]), ("b", [0])], "2 ranks of a are bound to core 0:"),
    ([("a", [0]), ("b", [4, 9]), ("b", [4, 9])], "2 ranks of b are bound to core 4, 9:"),
    ([("a", [0]), ("a", [1]), ("b", [0])], ""),                # to cores of their own
    ([("a", []), ("a", [])], "")])
def test_ranks_that_share_cores_to_which_openmp_has_bound_them_are_told(places, told):
    reports = [{"host": host, "bound": cores} for host, cores in places]
    notes = ddp_setup._notes_on_binding(reports)
    assert [told in note for note in notes] == [True] * bool(told)
