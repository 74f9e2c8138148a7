"""Do the job scripts train, stop in good order, go on from there and finish?

jobs/slurm.sh is submitted to a real Slurm of two nodes on this machine. The PBS scripts run on two
hosts (network namespaces) under a stand-in for the site, whose mpiexec is MPICH with the variables
of PALS.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launchers
from ddp_setup import load_checkpoint
from job_site import CONFIG, DRIVER, KEYS, SETTINGS, STEPS, logs
from launchers import (
    ROOT,
    Running,
    await_that,
    clean_environment,
    fork_ranks,
    host_words,
    need,
    read_status,
)
from training_runs import same_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Folder of a run on four ranks to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "config.yaml").write_text(CONFIG)
    argv = [ROOT / "train_sedd_ddp.py", "--config", "config.yaml", "--work_dir", "run"]
    result = fork_ranks(4, argv, folder)
    assert result.returncode == 0, result.text
    return folder / "run"


def check_finished(run_dir, reference):
    same_run(reference, run_dir)
    assert steps_saved(run_dir) == STEPS and read_status(run_dir)["code"] == 0


def steps_saved(run_dir):
    path = run_dir / "checkpoints" / "last.pt"
    return load_checkpoint(str(path))["step"] if path.exists() else 0


def stopped_at(run_dir, reason, after=6):
    """The step at which a run has stopped in good order, for this reason."""
    status = read_status(run_dir)
    saved = steps_saved(run_dir)
    assert status["code"] == 75 and reason in status["reason"], status
    assert after < saved == status["step"] < STEPS, status
    return saved


def await_step(folder, step, alive):
    """Until a log shows `step`; at once an error where the job is not alive any more."""
    def seen():
        there = f"step {step}/{STEPS}" in logs(folder)
        assert there or alive(), f"the job ended before step {step}:\n{logs(folder)}"
        return there
    await_that(seen, 400, lambda: f"step {step}\n{logs(folder)}")


def rank_process(job, place):
    """The process, not the guard, of the rank that has `place` in its environment."""
    found = [pid for pid in job.pids()
             if place in launchers.environment_of(pid)
             and any(entry.startswith("DDP_GUARD_FD=") for entry in launchers.environment_of(pid))]
    assert len(found) == 1, found
    return found[0]


# ---------------------------------------------------------------- a real Slurm
class SlurmJob(contextlib.AbstractContextManager):
    """jobs/slurm.sh, submitted for two nodes of two tasks, unless more options of sbatch say
    otherwise; the end of a `with` cancels it."""

    def __init__(self, folder, more=(), **variables):
        self.folder = folder
        self.mark = f"{launchers.MARK}={folder}"
        self.env = clean_environment("srun", {"PYTHON": sys.executable, "VENV": "none", **SETTINGS,
                                              **variables, launchers.MARK: folder})
        options = ["--gres=none", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1",
                   "--time=30"]
        self.id = self.ask("sbatch", "--parsable", *options, *more, "jobs/slurm.sh")

    def ask(self, *words):
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True,
                              timeout=600)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def told(self, name):
        return re.search(rf"\b{name}=(\S+)", self.ask("scontrol", "show", "job", self.id))[1]

    def alive(self):
        return self.told("JobState") in ("PENDING", "RUNNING", "CONFIGURING")

    def nodes(self):
        """The states of all nodes."""
        return set(self.ask("sinfo", "--noheader", "--Node", "--format=%T").split())

    def await_state(self, *states, seconds=300):
        await_that(lambda: self.told("JobState") in states, seconds,
                   lambda: f"{states}, but {self.told('JobState')}\n{logs(self.folder)}")

    def pids(self):
        """Of this job, with Slurm's own, which may yet report the end of an earlier start."""
        return [pid for pid in launchers.all_pids() if self.mark in launchers.environment_of(pid)
                or launchers.command_of(pid).startswith(f"slurmstepd: [{self.id}.")]

    def __exit__(self, *exception):
        if self.alive() or self.pids():
            self.ask("scancel", self.id)
        try:
            await_that(lambda: not self.pids(), 30,
                       lambda: f"processes {self.pids()} of job {self.id} stay")
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)


def test_slurm_jobs_go_on_after_scancel_and_usr1_to_the_weights_of_an_undisturbed_run(
        slurm, project, reference):
    run_dir = project / "runs" / "mine"
    with SlurmJob(project, PREFLIGHT="") as job:
        await_step(project, 7, job.alive)
        job.ask("scancel", job.id)
        job.await_state("CANCELLED", "PENDING", "FAILED", "COMPLETED", seconds=60)
        assert job.told("JobState") == "CANCELLED" and job.told("Restarts") == "0", logs(project)
        await_that(lambda: not job.pids(), 60, job.pids)
    cancelled = stopped_at(run_dir, "SIGTERM")

    with SlurmJob(project) as job:
        second_log = project / "logs" / f"config-{job.id}.log"
        await_step(project, cancelled + 2, job.alive)
        job.ask("scancel", "--signal=USR1", job.id)    # as --signal=USR1@180: to the tasks alone
        job.await_state("PENDING")
        saved = stopped_at(run_dir, "SIGUSR1", cancelled)
        assert "CANCELLED" not in second_log.read_text(), "a stop in good order"
        (project / "slow").unlink()
        # Slurm lets a requeued job wait two minutes. Started at once, while Slurm was still busy
        # with the end of the first start, it was sometimes FAILED without a line of output.
        await_that(lambda: not job.pids() and job.nodes() == {"idle"}, 60, job.nodes)
        time.sleep(2)
        job.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now")
        job.await_state("COMPLETED", "FAILED", "CANCELLED")
        assert job.told("JobState") == "COMPLETED" and job.told("Restarts") == "1", logs(project)
        await_that(lambda: not job.pids(), 60, job.pids)
    # Three starts, of which two have a pre-flight.
    for text, times in (("launcher Slurm step: rank 0 of 4", 5), (" passed, 0 failed", 2),
                        ("exit code 75; requeued: yes", 1), ("exit code 0; requeued: no", 1)):
        assert logs(project).count(text) == times, f"{text}\n{logs(project)}"
    for step in (cancelled, saved):
        assert f"continuing from step {step}" in " ".join(logs(project).split()), logs(project)
    check_finished(run_dir, reference)


def test_after_a_killed_rank_a_slurm_job_goes_on_without_its_host(slurm, project):
    with SlurmJob(project, PREFLIGHT="") as job:
        await_step(project, 7, job.alive)
        os.kill(rank_process(job, "SLURM_PROCID=3"), signal.SIGKILL)
        await_that(lambda: "starting again on n1, without n2" in logs(project), 120,
                   lambda: logs(project))
        (project / "slow").unlink()
        job.await_state("COMPLETED", "FAILED", "CANCELLED")
        assert job.told("JobState") == "COMPLETED" and job.told("Restarts") == "0", logs(project)
    text = " ".join(logs(project).split())
    assert "continuing from step 5" in text and "2 rank(s) on 1 host(s)" in text, text
    assert steps_saved(project / "runs" / "mine") == STEPS


# ---------------------------------------------------------------- two hosts
# The real MPICH, started as PALS' mpiexec would be, from the job's first host.
PALS_MPIEXEC = """#!/bin/bash
words=()
while [[ $1 == -* ]]; do
  case $1 in
    --cpu-bind) echo "$2" >> "$SITE/cpu-bind"; shift 2 ;;
    --envall) shift ;;
    *) words+=("-${1##*-}" "$2"); shift 2 ;;
  esac
done
export PALS_APID=apid-$$
words=("${words[@]/#-hostfile/-f}" "$SITE/bin/as-pals" "$@")
exec MPIEXEC -launcher rsh -launcher-exec HOST_SHELL "${words[@]}"
"""
# What a rank sees under PALS. MPI_Init reads MPICH's variables; HIDE keeps them from os.environ, in
# the guard and in its child.
AS_PALS = """#!/bin/bash
export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID
export PALS_NODEID=$((PMI_RANK / MPI_LOCALNRANKS)) PALS_LOCAL_SIZE=$MPI_LOCALNRANKS
for name in MPI_LOCALRANKID MPI_LOCALNRANKS PMI_RANK PMI_SIZE; do
  export "HIDDEN_$name=${!name}"
  unset "$name"
done
PYTHONPATH=$SITE/hide exec "$@"
"""
HIDE = """
import os
for name, value in os.environ.items():
    if name.startswith("HIDDEN_"):
        os.putenv(name.removeprefix("HIDDEN_"), value)    # which os.environ does not see
"""


@pytest.fixture
def pals_site(site, two_hosts):
    """A Site whose mpiexec starts ranks on hostA and hostB."""
    need("mpich-2hosts")
    mpiexec = PALS_MPIEXEC.replace("MPIEXEC", str(Path(sys.prefix, "bin", "mpiexec")))
    site.program("mpiexec", mpiexec.replace("HOST_SHELL", str(launchers.HOST_SHELL)))
    site.program("as-pals", AS_PALS)
    (site.folder / "hide").mkdir()
    (site.folder / "hide" / "sitecustomize.py").write_text(HIDE)
    return site


def test_pbs_jobs_go_on_after_qdel_and_by_the_clock_to_the_weights_of_an_undisturbed_run(
        pals_site, project, reference):
    site = pals_site
    run_dir = project / "runs" / "mine"
    with site.start("aurora.pbs", "101.site", on="hostA") as job:
        await_step(project, 7, lambda: job.process.poll() is None)
        mpiexec, = [pid for pid in job.pids() if launchers.about(pid, "comm").startswith("mpiexec")]
        for pid in (job.process.pid, mpiexec):    # as PBS does; SIGKILL would follow after 10 s
            os.kill(pid, signal.SIGTERM)
        result = job.wait(timeout=300, leftover_grace=5)     # seconds, where the machine is idle
    text = logs(project)
    cancelled = stopped_at(run_dir, "SIGTERM")
    assert result.returncode == 75 and result.leftover == [], result.text + text
    assert not site.goes_on()
    for said in ("launcher PALS: rank 0 of 4", "by MPI broadcast"):
        assert text.count(said) == 2, text      # pre-flight, training
    assert text.count("4 rank(s) on 2 host(s), 2 per host") == 1, text
    assert (site.folder / "cpu-bind").read_text().startswith("list:")

    (project / "driver.py").write_text(DRIVER.replace(     # its first step lasts until the deadline
        "time.sleep(0.5)", "time.sleep(max(0, float(os.environ['DDP_DEADLINE']) - time.time()))"))
    with site.start("aurora.pbs", "102.site", on="hostA", SAVE_SECONDS=7200 - 45, DDP_MPI4PY="0",
                    PREFLIGHT="") as job:
        result = job.wait(timeout=400)
    text = (project / "logs" / "config-102.log").read_text()
    assert result.returncode == 75 and result.leftover == [], text
    assert f"continuing from step {cancelled}" in " ".join(text.split()), text
    stopped_at(run_dir, "DDP_DEADLINE", cancelled)
    assert "found from MASTER_ADDR" in text

    words, variables = site.asked()
    assert site.goes_on()
    (project / "slow").unlink()
    with site.start(words[-1].removeprefix("jobs/"), "103.site", on="hostA", **variables) as job:
        result = job.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text + logs(project)
    assert not site.goes_on(), "a finished run needs no next job"
    check_finished(run_dir, reference)


def test_after_a_rank_is_killed_before_a_checkpoint_a_pbs_job_starts_again_with_the_same_batch(
        pals_site, project):
    site = pals_site
    with site.start("aurora.pbs", "101.site", on="hostA", PREFLIGHT="") as job:
        await_step(project, 2, lambda: job.process.poll() is None)
        os.kill(rank_process(job, "PALS_RANKID=3"), signal.SIGKILL)
        (project / "slow").unlink()
        result = job.wait(timeout=400)
    text = " ".join(logs(project).split())
    assert result.returncode == 0 and result.leftover == [], result.text + logs(project)
    assert "starting again on hostA, without hostB" in text
    for batch in ("accum 1 x 4 rank(s) = 16 per step", "accum 2 x 2 rank(s) = 16 per step"):
        assert batch in text, text
    assert not site.goes_on() and steps_saved(project / "runs" / "mine") == STEPS


MULTINODE = {**SETTINGS, "VENV": "none", "NNODES": 2, "MASTER_ADDR": "10.77.0.1"}


def multinode(project, **more):
    """jobs/torchrun_multinode.sh at once on hostA and hostB: a Running."""
    env = clean_environment(env={**MULTINODE, "PYTHON": sys.executable, **more})
    both = [host_words(host, ["env", f"NODE_RANK={rank}", "bash", "jobs/torchrun_multinode.sh"])
            for rank, host in enumerate(launchers.HOSTS)]
    return Running(both[0], project, env, both[1:])


def test_torchrun_on_two_hosts_stops_at_a_signal_to_one_and_goes_on_by_the_same_commands(
        two_hosts, project, reference):
    run_dir = project / "runs" / "mine"
    with multinode(project) as running:
        running.wait_for(f"step 7/{STEPS}", timeout=400)
        running.processes[1].send_signal(signal.SIGTERM)
        result = running.wait(timeout=400)
    assert result.returncode == 75 and result.leftover == [], result.text
    saved = stopped_at(run_dir, "SIGTERM")
    assert " passed, 0 failed" in result.stdout     # of the pre-flight
    (project / "slow").unlink()
    with multinode(project, PREFLIGHT="") as running:
        result = running.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text
    assert f"continuing from step {saved}" in " ".join(result.stdout.split())
    assert "4 rank(s) on 2 host(s)" in result.stdout
    check_finished(run_dir, reference)
    written = sorted((project / "logs").glob("config-0-*.log"))
    assert len(written) == 2 and f"step {STEPS}/{STEPS}" in written[-1].read_text()


# Run a command on a host, which gets none of our variables, as by ssh.
SSH = """#!/bin/bash
exec env -i HOME="$HOME" PATH=/usr/bin:/bin MARK="$MARK" HOST_SHELL "$@"
"""
# How each MPI reaches the other host, as its own variables say it.
REACH = """#!/bin/bash
export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC=$SITE/bin/ssh PRTE_MCA_plm_ssh_agent=$SITE/bin/ssh
export I_MPI_HYDRA_BOOTSTRAP=rsh I_MPI_HYDRA_BOOTSTRAP_EXEC=$SITE/bin/ssh
export PATH=$(dirname MPIRUN):$PATH
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec MPIRUN "$@"
"""


@pytest.fixture(params=["mpich", "openmpi", "intel"])
def mpi_site(request, site, two_hosts):
    """A Site whose mpirun, one of each MPI, starts ranks on hostA and hostB."""
    need(request.param)
    mpirun = Path(launchers.command(request.param, 1, ["any"])[0])
    site.program("mpirun", REACH.replace("MPIRUN", str(mpirun.with_name("mpirun"))))
    ssh = SSH.replace("HOST_SHELL", str(launchers.HOST_SHELL))
    site.program("ssh", ssh.replace("MARK", launchers.MARK))
    site.nodes(2)
    return site


def test_ranks_of_any_pbs_site_train_on_two_hosts_with_keys_that_no_command_line_shows(
        mpi_site, project, reference):
    (project / "slow").unlink()
    (project / "driver.py").write_text("""
import json, os, pathlib, socket
name = f"{socket.gethostname()}-{os.getpid()}.rank"
pathlib.Path(name).write_text(json.dumps(dict(os.environ)))
""" + DRIVER)
    seen = set()
    with mpi_site.start("pbs.sh", "101.site", on="hostA", PREFLIGHT="", NPROC="", **KEYS) as job:
        def ended():
            seen.update(map(launchers.command_of, job.pids()))
            return job.process.poll() is not None
        await_that(ended, 400, lambda: logs(project))
        result = job.wait(60)
    text = logs(project)
    assert result.returncode == 0 and result.leftover == [], result.text + text
    assert "4 rank(s) on 2 host(s)" in text and "found from MASTER_ADDR" in text, text
    check_finished(project / "runs" / "mine", reference)
    processes = sorted(project.glob("*.rank"))      # of each rank its guard too
    assert {path.name[:5] for path in processes} == {"hostA", "hostB"} and len(processes) == 8
    for path in processes:
        assert KEYS.items() <= json.loads(path.read_text()).items(), path
    assert any(" driver.py " in command for command in seen), seen
    assert "SECRET" not in "\n".join([*seen, result.text, text])
