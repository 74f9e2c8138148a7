"""Do the job scripts train, stop in good order, go on from there and end their chains where a scheduler runs them?

jobs/slurm.sh is submitted to a real Slurm of two nodes on this machine. jobs/aurora.pbs and jobs/polaris.pbs run on two
hosts (network namespaces) under a stand-in for the site: a `module` function, PBS' variables and files, a qsub that
writes down what it was asked, and an mpiexec that is MPICH, with the variables of PALS in place of its own.
jobs/torchrun_multinode.sh and mpirun run on the same two hosts. What is decided after a run (again, finished, stop) is
tested without ranks: the launcher is replaced by one that leaves a status.json and an exit code.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import launchers
from ddp_setup import load_checkpoint
from launchers import Running, clean_environment, need, run_ranks
from test_jobs import copy, local_sh  # noqa: F401  (copy is a fixture)

ROOT = Path(__file__).resolve().parents[1]
JOBS = ROOT / "jobs"
PBS = ("aurora.pbs", "polaris.pbs")
STEPS, SAVE_EVERY = 20, 5
CONFIG = f"""
training: {{batch_size: 4, n_iters: {STEPS}, eval_freq: {STEPS}, log_freq: 1, snapshot_freq: {SAVE_EVERY}}}
optim: {{lr: 3e-3, warmup: 4, ema: 0.9}}
model: {{hidden_size: 32, n_blocks: 1, n_heads: 2, cond_dim: 16, dropout: 0.1}}
data: {{max_length: 48, val_fraction: 0.05, demo_proteins: 300}}
memory: {{mixed_precision: false}}
monitoring: {{n_samples: 1, sample_steps: 2}}
"""
# train_sedd_ddp.py, whose steps take half a second while there is a file `slow`: what comes from outside meets a run.
DRIVER = """
import os, sys, time
import train_sedd_ddp
progress = train_sedd_ddp.RunLog.progress


def paced_progress(*values, **more):
    progress(*values, **more)
    if os.path.exists("slow"):
        time.sleep(0.5)


train_sedd_ddp.RunLog.progress = paced_progress
if __name__ == "__main__":
    train_sedd_ddp.cli(sys.argv[1:])
"""
# A small share of the median speed counts as slow: the ranks share few cores.
SETTINGS = {"SCRIPT": "driver.py", "CONFIG": "config.yaml", "RUN_DIR": "runs/mine", "NPROC": "2",
            "PREFLIGHT": "--preflight --slow 0.01"}


# ------------------------------------------------------------------------------------------------ helpers
@pytest.fixture
def project(tmp_path):
    """A copy of the project's files, with a config and a script of few steps; its name holds a space."""
    folder = tmp_path / "a copy"
    shutil.copytree(JOBS, folder / "jobs")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "driver.py").write_text(DRIVER)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "slow").touch()
    return folder


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Folder of a run on four ranks to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "config.yaml").write_text(CONFIG)
    result = run_ranks("torchrun", 4, [ROOT / "train_sedd_ddp.py", "--config", "config.yaml", "--work_dir", "run"],
                       folder, timeout=400)
    assert result.returncode == 0, result.text
    return folder / "run"


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def check_finished(run_dir, reference):
    """The run has come to its end, with the very weights of the undisturbed run."""
    mine, wanted = (load_checkpoint(str(folder / "checkpoints" / "last.pt")) for folder in (run_dir, reference))
    assert mine["step"] == STEPS and mine["machine"]["threads"] == 1
    for key in ("model", "ema", "optimizer"):
        assert equal(mine[key], wanted[key]), f"{key} differs from the undisturbed run"
    assert [json.loads(row)["step"] for row in (run_dir / "metrics.jsonl").read_text().splitlines()] == [
        *range(1, STEPS + 1)]
    assert read_status(run_dir)["code"] == 0 and (run_dir / "DONE").exists()


def read_status(run_dir):
    path = run_dir / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def steps_saved(run_dir):
    path = run_dir / "checkpoints" / "last.pt"
    return load_checkpoint(str(path))["step"] if path.exists() else 0


def logs(folder):
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted((folder / "logs").glob("*.*t"))
                     + sorted((folder / "logs").glob("*.err")) + sorted(folder.glob("slurm-*.out")))


def await_that(condition, seconds, what):
    """Return what `condition()` gives once it is true; AssertionError with what() if that takes too long."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.05)
    return result


def await_step(folder, name, step, alive=lambda: True, seconds=400):
    """Until the log `name` shows `step`; at once an error where the job is not alive any more."""
    path = folder / "logs" / name

    def seen():
        there = path.exists() and f"step {step}/{STEPS}" in path.read_text()
        assert there or alive(), f"the job ended before step {step}:\n{logs(folder)}"
        return there
    await_that(seen, seconds, lambda: f"step {step}\n{logs(folder)}")


# ------------------------------------------------------------------------------------------------ what stands in them
@pytest.mark.parametrize("name", ["slurm.sh", *PBS, "torchrun_multinode.sh", "local.sh"])
def test_shellcheck_has_nothing_to_say(name):
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck; the package of that name has it")
    checked = subprocess.run(["shellcheck", "--shell=bash", JOBS / name], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_blocks_that_job_scripts_share_are_equal_and_stand_where_they_say():
    blocks = {}
    for path in sorted(JOBS.iterdir()):
        for name, names, text in re.findall(r"^# >>> (\w+): the same lines in (.*) >>>\n(.*?)^# <<< \1 <<<$",
                                            path.read_text(), re.M | re.S):
            blocks.setdefault((name, names), {})[path.name] = text
    assert {name for name, _ in blocks} >= {"run", "preflight", "PBS", "job"}
    for (name, names), copies in blocks.items():
        said = {Path(word).name for word in re.split(r",? and |, ", names)}
        assert copies.keys() == said, f"the block {name} says {names}"
        assert len(set(copies.values())) == 1, f"the lines of the block {name} differ among {sorted(copies)}"
    for path in JOBS.iterdir():
        marks = re.findall(r"^# (?:>>>|<<<) (\w+).*", path.read_text(), re.M)
        assert marks[::2] == marks[1::2], path.name


@pytest.mark.parametrize("name", ["slurm.sh", *PBS, "torchrun_multinode.sh"])
def test_a_job_script_names_no_account_and_defines_what_it_uses_before_it_stops_at_errors(name):
    text = (JOBS / name).read_text()
    assert not re.search(r"^#(PBS|SBATCH) .*(-A|--account)", text, re.M)
    assert len(re.findall(r"^set -euo pipefail\b", text, re.M)) == 1
    modules = re.search(r"^site_modules |^# module load ", text, re.M)
    assert modules is None and name == "torchrun_multinode.sh" or modules.start() < text.index("\nset -euo pipefail")
    directives = [number for number, line in enumerate(text.splitlines()) if line.startswith(("#PBS", "#SBATCH"))]
    assert directives == list(range(min(directives, default=0), max(directives, default=-1) + 1)), "comments between"
    commented = "CCL_LOG_LEVEL=info" if name == "aurora.pbs" else "NCCL_DEBUG=INFO"
    assert re.search(rf"^ *# export {commented}", text, re.M)
    assert not re.search(r"^[^#\n]*GLOO_SOCKET_IFNAME=\^", text, re.M)


@pytest.mark.parametrize("name, ranks, cores, reserved", [
    # Cores 0 and 52 are the system's; 42 to 47 and 94 to 99 those of oneCCL's threads, 48 to 51 of Copper.
    ("aurora.pbs", 12, 104, {0, 52, *range(42, 52), *range(94, 100)}), ("polaris.pbs", 4, 32, set())])
def test_every_rank_has_cores_of_its_own_on_one_socket(name, ranks, cores, reserved):
    text = (JOBS / name).read_text()
    spans = [tuple(map(int, span.split("-"))) for span in
             re.search(r"CPU_BIND:-list:([\d:-]+)\}", text)[1].split(":")]
    assert re.search(rf"NPROC:-{ranks}\}}", text) and len(spans) == ranks
    mine = [set(range(first, last + 1)) for first, last in spans]
    assert len(set().union(*mine)) == sum(map(len, mine)) and not set().union(*mine) & reserved
    assert {len(each) for each in mine} == {int(re.search(r"THREADS:-(\d+)", text)[1])}
    sockets = [{core // (cores // 2) for core in each} for each in mine]
    assert all(len(each) == 1 for each in sockets)
    assert sorted(sum(map(list, sockets), [])) == [0] * (ranks // 2) + [1] * (ranks // 2)


# ------------------------------------------------------------------------------------------------ decisions, no ranks
# In place of mpiexec and srun: leaves the status.json and the exit code that OUTCOMES lists for its next call.
FAKE_LAUNCHER = """#!/bin/bash
n=$(cat "$SITE/calls" 2> /dev/null || echo 0)
echo $((n + 1)) > "$SITE/calls"
echo "$DDP_WORLD_SIZE $*" >> "$SITE/launched"
read -r told code _ <<< "$(sed -n "$((n + 1))p" "$SITE/outcomes")"
while [ $# -gt 0 ]; do
  case $1 in --work_dir) run=$2 ;; --suspects) suspects=$2 ;; esac
  shift
done
if [ -n "${suspects:-}" ]; then
  if [ "$told" != - ]; then tr , '\\n' <<< "$told" > "$suspects"; fi
  exit "$code"
fi
mkdir -p "$run/checkpoints"
if [ "$told" != - ]; then echo "{\\"code\\": $told, \\"reason\\": \\"x\\", \\"step\\": 1}" > "$run/status.json"; fi
exit "$code"
"""
SITE = """
module() { loaded="$*"; }
conda() { :; }
export PATH=$SITE/bin:$PYTHON_FOLDER:$PATH
"""
QSUB = """
import json, os, sys
number = 1 + max(int(name.partition(".")[0]) for name in os.listdir(os.environ["SITE"] + "/queue"))
words, names = sys.argv[1:], sys.argv[sys.argv.index("-v") + 1].split(",")
with open(f"{os.environ['SITE']}/queue/{number}.site", "w") as f:
    json.dump({"words": words, "variables": {name: os.environ[name] for name in names}}, f)
print(f"{number}.site")
"""
QSTAT = """#!/bin/bash
if [ "$1" = -f ]; then cat "$SITE/attributes"; else [ -e "$SITE/queue/$1" ]; fi
"""
ATTRIBUTES = """Job Id: 101.site
    Account_Name = AnyProject
    Resource_List.filesystems = flare
    Resource_List.ncpus = 416
    Resource_List.place = scatter
    Resource_List.select = 2:sys\n\ttem=any
    Resource_List.walltime = 02:00:00
"""


class Site:
    """A stand-in for a PBS site: start(script, job, env) runs a copy of it from a spool folder, as PBS would."""

    def __init__(self, folder, project, hosts):
        self.folder, self.project = folder, project
        for name in ("bin", "home", "spool", "queue"):
            (folder / name).mkdir(parents=True)
        (folder / "queue" / "101.site").touch()
        (folder / "home" / ".bash_profile").write_text(SITE)
        (folder / "attributes").write_text(ATTRIBUTES)
        (folder / "nodes").write_text("".join(f"{host}\n" for host in hosts for _ in range(2)))   # as with mpiprocs=2
        for name, text in (("qsub", f"#!{sys.executable}{QSUB}"), ("qstat", QSTAT),
                           ("qdel", '#!/bin/bash\necho "$1" >> "$SITE/deleted"\nrm "$SITE/queue/$1"\n')):
            self.program(name, text)

    def program(self, name, text):
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def fake_launcher(self, *outcomes):
        (self.folder / "outcomes").write_text("\n".join(outcomes) + "\n")
        (self.folder / "calls").unlink(missing_ok=True)
        for name in ("mpiexec", "srun"):
            self.program(name, FAKE_LAUNCHER)

    def environment(self, job, **more):
        return clean_environment(env={
            "SITE": self.folder, "PYTHON_FOLDER": Path(sys.executable).parent, "HOME": self.folder / "home",
            "PBS_JOBID": job, "PBS_JOBNAME": "sedd", "PBS_QUEUE": "capacity", "PBS_O_QUEUE": "capacity",
            "PBS_NODEFILE": self.folder / "nodes", "PBS_O_WORKDIR": self.project, "PBS_ENVIRONMENT": "PBS_BATCH",
            "TMPDIR": "/var/tmp/pbs." + job, "NCPUS": 208, "OMP_NUM_THREADS": 208, "THREADS": 1,
            "VENV": "none", **SETTINGS, **more})

    def start(self, script, job, on=None, **more):
        copy = self.folder / "spool" / f"{job}.SC"
        shutil.copy(self.project / "jobs" / script, copy)
        words = ["bash", "-l", str(copy)]
        if on:
            words = [str(launchers.HOST_SHELL), on, "exec " + shlex.join(words)]
        return Running(words, self.folder / "home", self.environment(job, **more))

    def run(self, script, job, **more):
        """To its end, without ranks: the exit code."""
        with self.start(script, job, **more) as running:
            return running.wait(60).returncode

    def submitted(self, number):
        """What qsub was asked for: {"words", "variables"}; None if nothing was."""
        path = self.folder / "queue" / f"{number}.site"
        return json.loads(path.read_text()) if path.exists() else None

    def deleted(self):
        path = self.folder / "deleted"
        return path.read_text().split() if path.exists() else []

    def launched(self):
        path = self.folder / "launched"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def site(tmp_path, project):
    return Site(tmp_path / "site", project, ("hostA", "hostB"))


OUTCOMES = [   # status.json's code and the launcher's -> the job's exit code, whether the chain goes on: PBS, Slurm
    ("0 0", 0, False, False), ("75 75", 75, True, True), ("75 143", 75, True, True), ("75 1", 75, True, True),
    ("0 143", 0, False, False), ("70 1", 70, True, True), ("2 2", 2, False, False), ("2 143", 2, False, False),
    ("1 1", 1, True, False), ("null 137", 137, True, False), ("null 0", 1, True, False), ("null 2", 2, False, False),
    ("- 2", 2, False, False), ("- 0", 0, False, False), ("- 75", 75, True, True)]


@pytest.mark.parametrize("script", PBS)
def test_what_pbs_chains_do_after_each_end_of_a_run(script, site, project):
    run_dir = project / "runs" / "mine"
    for k, (outcome, code, goes_on, _) in enumerate(OUTCOMES):
        site.fake_launcher(outcome)
        shutil.rmtree(site.folder / "queue")
        (site.folder / "queue").mkdir()
        (site.folder / "queue" / "101.site").touch()
        (site.folder / "deleted").unlink(missing_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        ended = site.run(script, "101.site", PREFLIGHT="", RUN_DIR="runs/mine")
        assert (ended, site.submitted(102) is not None, site.deleted() == ["102.site"], (run_dir / "DONE").exists()) == (
            code, goes_on, not goes_on, code == 0), f"{outcome}\n{logs(project)}"
        assert len(site.launched()) == k + 1
    assert site.launched()[0].startswith("4 -n 4 --ppn 2 --hostfile logs/sedd-101.hosts --cpu-bind list:")
    assert (project / "logs" / "sedd-101.hosts").read_text() == "hostA\nhostB\n"


@pytest.mark.parametrize("told", [0, 75])
def test_what_an_earlier_start_said_does_not_count(told, site, project):
    run_dir = project / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "status.json").write_text(json.dumps({"code": told, "reason": "earlier", "step": 1}))
    site.fake_launcher("- 143")      # killed before it could say anything
    assert site.run("aurora.pbs", "101.site", PREFLIGHT="", AGAIN_ON="75") == 143, logs(project)
    assert site.deleted() == ["102.site"] and not (run_dir / "DONE").exists()
    assert read_status(run_dir)["code"] is None


@pytest.mark.parametrize("script", PBS)
def test_a_pbs_job_submits_its_successor_with_the_same_resources_and_settings(script, site, project):
    site.fake_launcher("75 75", "75 75")
    arguments = "training.stop_signals=[SIGTERM,SIGUSR1] data.max_length=32"
    assert site.run(script, "101.site", PREFLIGHT="", ARGS=arguments, NPROC="3") == 75, logs(project)
    asked = site.submitted(102)
    words = " ".join(asked["words"])
    for part in ("-W depend=afterany:101.site", "-A AnyProject", "-q capacity", "-l select=2:system=any",
                 "-l place=scatter", "-l walltime=02:00:00", "-l filesystems=flare", "-N sedd", f"jobs/{script}"):
        assert part in words
    wanted = {"ARGS": arguments, "NPROC": "3", "RUN_DIR": "runs/mine", "CHAINED": "1", "PREFLIGHT": ""}
    assert {name: asked["variables"][name] for name in wanted} == wanted
    launched = site.launched()[0]
    assert launched.endswith("--config config.yaml --work_dir runs/mine " + arguments) and launched.startswith("6 -n 6 ")

    # PBS may run a job again: it must not get a second successor.
    assert site.run(script, "101.site", PREFLIGHT="") == 75 and site.submitted(103) is None, logs(project)


@pytest.mark.parametrize("script", PBS)
def test_a_pbs_chain_ends_where_it_should_not_go_on(script, site, project):
    run_dir = project / "runs" / "mine"
    site.fake_launcher(*["75 75"] * 9)
    assert site.run(script, "101.site", PREFLIGHT="", PBS_QUEUE="debug-scaling", PBS_O_QUEUE="debug-scaling") == 75
    assert site.submitted(102) is None
    assert site.run(script, "101.site", PREFLIGHT="", CHAIN="0") == 75 and site.submitted(102) is None

    # Three runs in a row that leave no checkpoint; a run that leaves one, or a start by hand, counts anew.
    for job, chained in ((101, "0"), (102, "1"), (103, "1")):
        assert site.run(script, f"{job}.site", PREFLIGHT="", CHAINED=chained) == 75, logs(project)
    assert site.run(script, "104.site", PREFLIGHT="", CHAINED="1") == 2 and len(site.launched()) == 5
    assert "the last 3 runs in a row left no new checkpoint" in logs(project)
    assert site.submitted(105) is None, "what refuses to run must not submit"
    (run_dir / "checkpoints" / "last.pt").write_text("new")
    assert site.run(script, "104.site", PREFLIGHT="", CHAINED="1") == 75
    assert site.submitted(105) is not None

    (run_dir / "STOP").touch()
    assert site.run(script, "105.site", PREFLIGHT="", CHAINED="1") == 2 and site.submitted(106) is None
    (run_dir / "STOP").unlink()
    (run_dir / "DONE").touch()
    assert site.run(script, "105.site", PREFLIGHT="", CHAINED="1") == 0 and site.submitted(106) is None
    assert len(site.launched()) == 6


@pytest.mark.parametrize("variables, message", [
    ({"ARGS": "--fresh"}, "--fresh would start over at every continuation"),
    ({"ARGS": "--work_dir here"}, "give the run folder as RUN_DIR"),
    ({"ARGS": "--output_dir here"}, "give the run folder as RUN_DIR"),
    ({"ARGS": "--resume last.pt"}, "--resume would be refused"),
    ({"NPROC": "many"}, "NPROC is 'many'"), ({"SCRIPT": "no.py"}, "SCRIPT=no.py is not a file"),
    ({"CONFIG": "no.yaml"}, "CONFIG=no.yaml is not a file"), ({"NODES": "3"}, "NODES=3, but the job has 2: hostA hostB"),
    ({"PYTHON": "no-python"}, "PYTHON=no-python is not a program"),
    ({"SAVE_SECONDS": "7200"}, "the walltime 02:00:00 is not longer than SAVE_SECONDS=7200")])
def test_a_pbs_job_refuses_before_it_trains_or_submits(variables, message, site, project):
    site.fake_launcher("0 0")
    assert site.run("aurora.pbs", "101.site", **variables) == 2
    assert message in (project / "logs" / "sedd-101.err").read_text()
    assert site.launched() == [] and site.submitted(102) is None


@pytest.mark.parametrize("script", PBS)
def test_modules_that_cannot_be_loaded_and_a_users_logout_file_do_not_hide_how_a_job_ends(script, site, project):
    site.fake_launcher("75 143", "75 143")
    (site.folder / "home" / ".bash_logout").write_text("false\n$no_such_variable\n")
    assert site.run(script, "101.site", PREFLIGHT="", RUN_DIR="runs/mine/") == 75, logs(project)
    profile = site.folder / "home" / ".bash_profile"
    profile.write_text(profile.read_text() + "module() { return 1; }\n")
    assert site.run(script, "102.site", PREFLIGHT="") == 2 and len(site.launched()) == 1


def test_the_successor_of_a_changed_copy_is_that_copy(site, project):
    site.fake_launcher("75 143")
    copy_of_it = project / "mine.pbs"
    copy_of_it.write_text((project / "jobs" / "aurora.pbs").read_text() + "# mine\n")
    shutil.copy(copy_of_it, project / "jobs" / "mine.pbs")
    assert site.run("mine.pbs", "101.site", PREFLIGHT="") == 75, logs(project)
    assert site.submitted(102)["words"][-1].endswith("101.site.SC")


def test_the_deadline_is_the_walltime_less_the_time_to_save(site, project):
    site.program("mpiexec", '#!/bin/bash\necho "$DDP_DEADLINE" > "$SITE/deadline"\n')
    before = time.time()
    assert site.run("aurora.pbs", "101.site", PREFLIGHT="", SAVE_SECONDS="900") == 0, logs(project)
    assert before + 7200 - 900 - 1 <= int((site.folder / "deadline").read_text()) <= time.time() + 7200 - 900


@pytest.mark.parametrize("script", [*PBS, "slurm.sh"])
def test_hosts_that_fail_the_preflight_are_left_out_once_where_others_are_to_spare(script, site, project, tmp_path):
    hosts = ["x1c0s0b0n0.hsn.site", "x1c0s0b0n1.hsn.site", "x1c0s0b0n10.hsn.site"]

    def run(*outcomes, nodes):
        (site.folder / "nodes").write_text("".join(f"{host}\n" for host in hosts))
        (site.folder / "launched").unlink(missing_ok=True)
        shutil.rmtree(project / "runs", ignore_errors=True)
        site.fake_launcher(*outcomes)
        if script == "slurm.sh":
            return SlurmStandIn(site).run(hosts, NODES=nodes)
        return site.run(script, "101.site", NODES=nodes, CHAIN="0")

    def ranks():
        return [int(line.split()[0]) for line in site.launched()]

    # The second host is bad, the first two are wanted: the first and the third are used.
    assert run("x1c0s0b0n1 3", "- 0", "75 75", nodes="2") == 75, logs(project)
    assert ranks() == [6, 4, 4]
    used = (project / "logs" / "sedd-101.hosts").read_text().split()
    assert used == [hosts[0], hosts[2]]
    # None to spare: the same again, then no training and exit code 3.
    assert run("x1c0s0b0n1 3", "x1c0s0b0n1 143", nodes="3") == 3, logs(project)
    assert ranks() == [6, 6] and "Suspect hosts: x1c0s0b0n1" in logs(project)
    # No host to blame: the same again.
    assert run("- 3", "- 0", "0 0", nodes="") == 0 and ranks() == [6, 6, 6]
    # All is well: what is to spare is not used.
    assert run("- 0", "0 0", nodes="1") == 0 and ranks() == [6, 2]


class SlurmStandIn:
    """jobs/slurm.sh with the fake launcher of a Site, squeue and scontrol: for decisions only."""

    def __init__(self, site):
        self.site = site
        site.program("squeue", "#!/bin/bash\necho ${END-NONE}\n")
        site.program("scontrol", '#!/bin/bash\nif [ "$1" = show ]; then tr , "\\n" <<< "$3"; else echo "$*" >> '
                                 '"$SITE/requeued"; fi\n')

    def run(self, hosts=("n1", "n2"), arguments=(), **more):
        (self.site.folder / "requeued").unlink(missing_ok=True)
        env = clean_environment(env={
            "SITE": self.site.folder, "PATH": f"{self.site.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": self.site.project, "SLURM_JOB_NAME": "sedd", "SLURM_JOB_ID": "101",
            "SLURM_JOB_NODELIST": ",".join(hosts), "SLURM_JOB_NUM_NODES": len(hosts), **SETTINGS, **more})
        copy = self.site.folder / "spool" / "slurm_script"
        shutil.copy(self.site.project / "jobs" / "slurm.sh", copy)
        with Running(["bash", str(copy), *arguments], self.site.project, env) as running:
            return running.wait(60).returncode

    def requeued(self):
        path = self.site.folder / "requeued"
        return path.exists() and path.read_text() == "requeue 101\n"


def test_what_a_slurm_job_does_after_each_end_of_a_run(site, project):
    slurm, run_dir = SlurmStandIn(site), project / "runs" / "mine"
    for outcome, code, _, goes_on in OUTCOMES:
        site.fake_launcher(outcome)
        shutil.rmtree(run_dir, ignore_errors=True)
        ended = slurm.run(PREFLIGHT="", arguments=["optim.lr=1e-4"])
        assert (ended, slurm.requeued(), (run_dir / "DONE").exists()) == (code, goes_on, code == 0), (
            f"{outcome}\n{logs(project)}")
    assert site.launched()[0].startswith("4 --nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=n1,n2")
    assert "--kill-on-bad-exit=1" in site.launched()[0] and site.launched()[0].endswith("runs/mine optim.lr=1e-4")


def test_a_slurm_chain_ends_where_it_should_not_go_on(site, project):
    slurm, run_dir = SlurmStandIn(site), project / "runs" / "mine"
    site.fake_launcher(*["75 75"] * 9)
    assert slurm.run(PREFLIGHT="", REQUEUE="0") == 75 and not slurm.requeued()
    for restart in (0, 1, 2):
        assert slurm.run(PREFLIGHT="", SLURM_RESTART_COUNT=restart) == 75 and slurm.requeued()
    assert slurm.run(PREFLIGHT="", SLURM_RESTART_COUNT=3) == 2 and not slurm.requeued()
    assert slurm.run(PREFLIGHT="", END="2000-01-01T00:00:00") == 2 and "not longer than SAVE_SECONDS" in logs(project)
    (run_dir / "STOP").touch()
    assert slurm.run(PREFLIGHT="") == 2
    (run_dir / "STOP").unlink()
    (run_dir / "DONE").touch()
    assert slurm.run(PREFLIGHT="") == 0 and len(site.launched()) == 4


@pytest.mark.slow
def test_install_leaves_out_torch_and_mpi4py(site, project):
    (project / "requirements.txt").write_text("# a list\ntorch==0.0.1\n\nmpi4py==0.0.1\n")   # neither version exists
    env = site.environment("101.site", VENV="on-top", PYTHON=sys._base_executable)
    with Running(["bash", "-l", str(project / "jobs" / "aurora.pbs"), "--install"], project, env) as running:
        result = running.wait(300)
    assert result.returncode == 0, result.text
    asked = [project / "on-top" / "bin" / "python", "-c", "import sys; print(sys.prefix)"]
    assert subprocess.run(asked, capture_output=True, text=True).stdout.strip() == str(project / "on-top")
    assert "include-system-site-packages = true" in (project / "on-top" / "pyvenv.cfg").read_text()


def break_the_preflight(project, host):
    """From now on the pre-flight fails on `host`."""
    path = project / "test_aurora_ddp.py"
    text = path.read_text()
    head = "def place(row, ddp, args, told):\n"
    assert text.count(head) == 1
    path.write_text(text.replace(head, f"{head}    if {host!r} in (os.environ.get('SLURMD_NODENAME'), ddp.host):\n"
                                       f"        raise RuntimeError('on purpose')\n"))


# ------------------------------------------------------------------------------------------------ a real Slurm
class SlurmJob:
    """jobs/slurm.sh, submitted with sbatch for two nodes of two tasks; to be used in a `with`, whose end cancels it."""

    def __init__(self, folder, *arguments, **variables):
        self.folder, self.mark = folder, f"{launchers.MARK}={folder}"
        self.env = clean_environment("srun", {"PYTHON": sys.executable, "VENV": "none", **SETTINGS, **variables,
                                              launchers.MARK: folder})
        options = ["--gres=none", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=30"]
        self.id = self.ask("sbatch", "--parsable", *options, "jobs/slurm.sh", *arguments)

    def ask(self, *words):
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def told(self, name):
        return re.search(rf"\b{name}=(\S+)", self.ask("scontrol", "show", "job", self.id))[1]

    def alive(self):
        return self.told("JobState") in ("PENDING", "RUNNING", "CONFIGURING")

    def await_state(self, *states, seconds=300):
        await_that(lambda: self.told("JobState") in states, seconds,
                   lambda: f"{states}, but {self.told('JobState')}\n{logs(self.folder)}")

    def pids(self):
        """Of this job, with Slurm's own: one that is still there may yet report the end of an earlier start."""
        return [pid for pid in launchers._all_pids() if self.mark in launchers._environment(pid)
                or launchers._command(pid).startswith(f"slurmstepd: [{self.id}.")]

    def rank_pid(self, rank):
        """Process id of a rank of the training."""
        for pid in self.pids():
            environment = launchers._environment(pid)
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"SLURM_PROCID={rank}" in environment and command[2:3] == [b"driver.py"]:
                return pid
        raise AssertionError(f"rank {rank} is not among {self.pids()}\n{logs(self.folder)}")

    def text(self):
        return (self.folder / "logs" / f"sedd-{self.id}.out").read_text()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.alive() or self.pids():
            self.ask("scancel", self.id)
        try:
            await_that(lambda: not self.pids(), 30, lambda: f"processes {self.pids()} of job {self.id} stay")
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)


def test_a_slurm_job_saves_at_usr1_is_requeued_and_ends_with_the_weights_of_an_undisturbed_run(slurm, project, reference):
    run_dir = project / "runs" / "mine"
    with SlurmJob(project) as job:
        await_step(project, f"sedd-{job.id}.out", 7, job.alive)
        job.ask("scancel", "--signal=USR1", job.id)      # what --signal=USR1@180 sends: to the tasks alone
        job.await_state("PENDING")
        assert read_status(run_dir)["code"] == 75 and "SIGUSR1" in read_status(run_dir)["reason"]
        saved = steps_saved(run_dir)
        assert 7 <= saved < STEPS and saved == read_status(run_dir)["step"]
        (project / "slow").unlink()
        await_that(lambda: not job.pids(), 60, job.pids)
        job.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now")   # Slurm lets a requeued job wait two minutes
        job.await_state("COMPLETED", "FAILED", "CANCELLED")
        assert job.told("JobState") == "COMPLETED" and job.told("Restarts") == "1", logs(project)
        await_that(lambda: not job.pids(), 60, job.pids)
        print(logs(project))
    assert f"continuing from step {saved}" in " ".join(job.text().split()), logs(project)
    assert job.text().count("launcher Slurm step: rank from SLURM_PROCID") == 4      # pre-flight and training, twice
    assert job.text().count("7 passed, 0 failed") == 2 and job.text().count("the run stops and saves at") == 2
    check_finished(run_dir, reference)


@pytest.mark.slow
def test_a_rank_that_dies_takes_the_slurm_job_down(slurm, project):
    with SlurmJob(project, PREFLIGHT="") as job:
        await_step(project, f"sedd-{job.id}.out", 7, job.alive)
        os.kill(job.rank_pid(3), signal.SIGKILL)
        job.await_state("FAILED", "COMPLETED", "PENDING", "CANCELLED", seconds=60)
        assert job.told("JobState") == "FAILED" and job.told("Restarts") == "0", logs(project)
        await_that(lambda: not job.pids(), 30, job.pids)
        assert job.told("ExitCode") not in ("0:0", "75:0", "2:0")
    assert steps_saved(project / "runs" / "mine") in (5, 10) and not (project / "runs" / "mine" / "DONE").exists()
    assert "rank 3" in (project / "logs" / f"sedd-{job.id}.err").read_text()


@pytest.mark.slow
def test_scancel_leaves_a_checkpoint_that_the_next_sbatch_goes_on_from(slurm, project, reference):
    run_dir = project / "runs" / "mine"
    with SlurmJob(project, PREFLIGHT="") as job:
        await_step(project, f"sedd-{job.id}.out", 7, job.alive)
        job.ask("scancel", job.id)
        job.await_state("CANCELLED", "PENDING", "FAILED", "COMPLETED", seconds=60)
        assert job.told("JobState") == "CANCELLED" and job.told("Restarts") == "0", logs(project)
        await_that(lambda: not job.pids(), 60, job.pids)
    saved = steps_saved(run_dir)
    assert saved >= 7 and read_status(run_dir)["code"] == 75, logs(project)
    (project / "slow").unlink()
    with SlurmJob(project, PREFLIGHT="") as job:
        job.await_state("COMPLETED", "FAILED")
    assert f"continuing from step {saved}" in " ".join(job.text().split()), logs(project)
    check_finished(run_dir, reference)


@pytest.mark.slow
def test_a_slurm_job_trains_on_the_nodes_that_pass_the_preflight(slurm, project):
    (project / "slow").unlink()
    break_the_preflight(project, "n2")
    with SlurmJob(project, NODES="1") as job:
        job.await_state("COMPLETED", "FAILED")
        assert job.told("JobState") == "COMPLETED", logs(project)
    assert "suspect hosts: n2" in job.text() and "leaving out n2" in job.text()
    assert re.search(r"Initialized DDP: 2 rank\(s\) on 1 host\(s\)", job.text()), logs(project)
    assert read_status(project / "runs" / "mine")["code"] == 0


# ------------------------------------------------------------------------------------------------ here
def test_local_sh_writes_its_output_to_files_too_and_takes_arguments_from_the_environment(copy):  # noqa: F811
    need("mpich")
    code, printed = local_sh(copy, "1", "x=1", ARGS="--data a.fasta")
    assert code == 0 and "['--config', 'config.yaml', '--data', 'a.fasta', 'x=1']" in printed, printed
    (out,), (err,) = ([*(copy / "logs").glob(f"config-*.{kind}")] for kind in ("out", "err"))
    assert "['--config', 'config.yaml', '--data', 'a.fasta', 'x=1']" in out.read_text() and err.read_text() == ""
    code, printed = local_sh(copy, "1", "fail", LOGS="0")
    assert code == 5 and "'fail'" in printed and len([*(copy / "logs").iterdir()]) == 2


# ------------------------------------------------------------------------------------------------ two hosts
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
exec MPIEXEC -launcher rsh -launcher-exec HOST_SHELL "${words[@]/#-hostfile/-f}" "$SITE/bin/as-pals" "$@"
"""
# What a rank sees under PALS. MPI_Init reads MPICH's own variables, from a place that Python's os.environ does not show:
# see HIDE.
AS_PALS = {"aurora.pbs": """#!/bin/bash
export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID PALS_LOCAL_SIZE=$MPI_LOCALNRANKS
export PALS_NODEID=$((PMI_RANK / MPI_LOCALNRANKS)) HIDDEN="PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
PYTHONPATH=$SITE/hide exec "$@"
""", "polaris.pbs": """#!/bin/bash
export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$MPI_LOCALRANKID PALS_NODEID=$((PMI_RANK / MPI_LOCALNRANKS))
export PMI_LOCAL_RANK=$MPI_LOCALRANKID PMI_LOCAL_SIZE=$MPI_LOCALNRANKS HIDDEN="MPI_LOCALRANKID MPI_LOCALNRANKS"
PYTHONPATH=$SITE/hide exec "$@"
"""}
HIDE = """
import os
for name in os.environ.get("HIDDEN", "").split():
    os.environ._data.pop(os.environ.encodekey(name), None)    # not `del`, which would call unsetenv
"""


@pytest.fixture
def pals_site(site, two_hosts):
    """pals_site(script) -> a Site whose mpiexec starts ranks on hostA and hostB."""
    need("mpich-2hosts")

    def prepare(script):
        mpiexec = PALS_MPIEXEC.replace("MPIEXEC", str(Path(sys.prefix, "bin", "mpiexec")))
        site.program("mpiexec", mpiexec.replace("HOST_SHELL", str(launchers.HOST_SHELL)))
        site.program("as-pals", AS_PALS[script])
        (site.folder / "hide").mkdir()
        (site.folder / "hide" / "sitecustomize.py").write_text(HIDE)
        return site
    return prepare


def terminate_as_pbs_does(job):
    """SIGTERM to the job's shell and to mpiexec, its processes on the first host; SIGKILL would follow after 10 s."""
    started = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in job.pids()}
    mpiexec = [pid for pid, name in started.items() if name.startswith("mpiexec")]
    assert len(mpiexec) == 1, started
    for pid in (job.process.pid, *mpiexec):
        os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("script, more", [
    ("aurora.pbs", {}), pytest.param("polaris.pbs", {"DDP_MPI4PY": "0"}, marks=pytest.mark.slow)])
def test_a_pbs_job_saves_at_the_walltime_and_its_successor_ends_with_the_weights_of_an_undisturbed_run(
        script, more, pals_site, project, reference):
    site, run_dir = pals_site(script), project / "runs" / "mine"
    with site.start(script, "101.site", on="hostA", **more) as job:
        await_step(project, "sedd-101.out", 7, lambda: job.process.poll() is None)
        terminate_as_pbs_does(job)
        result = job.wait(timeout=60, leftover_grace=5)     # seconds, where the machine is idle
        assert result.returncode == 75 and result.leftover == [], result.text + logs(project)
    saved = steps_saved(run_dir)
    assert 7 <= saved < STEPS and read_status(run_dir)["code"] == 75 and "SIGTERM" in read_status(run_dir)["reason"]
    successor = site.submitted(102)
    assert successor["words"][-1] == f"jobs/{script}" and site.deleted() == []

    (project / "slow").unlink()
    with site.start(script, "102.site", on="hostA", **successor["variables"]) as job:
        result = job.wait(timeout=400)
    text = logs(project)
    assert result.returncode == 0 and result.leftover == [], result.text + text
    assert f"continuing from step {saved}" in " ".join(text.split()), text
    assert text.count("launcher PALS: rank from PALS_RANKID") == 4, text       # pre-flight and training, twice
    assert text.count("size from PMI_SIZE") == (4 if script == "polaris.pbs" else 0), text
    assert text.count("by MPI broadcast" if not more else "found from MASTER_ADDR") == 4, text
    assert text.count("4 ranks on 2 host(s), 2 per host") == 2, text
    check_finished(run_dir, reference)
    assert site.deleted() == ["103.site"], "a finished run needs no successor"
    assert (site.folder / "cpu-bind").read_text().startswith("list:")

    with site.start(script, "104.site", on="hostA") as job:
        result = job.wait(timeout=30)
    assert result.returncode == 0 and "this run is finished" in logs(project) and site.submitted(104) is None


@pytest.mark.parametrize("script", PBS)
def test_the_default_job_without_its_data_says_in_one_line_how_to_make_it(script, pals_site, project):
    site = pals_site(script)
    shutil.copytree(ROOT / "configs", project / "configs")
    more = {"SCRIPT": "train_sedd_ddp.py", "CONFIG": "configs/sedd_uniref50.yaml", "PREFLIGHT": ""}
    with site.start(script, "101.site", on="hostA", **more) as job:
        result = job.wait(timeout=60)
    assert result.returncode == 2 and not result.leftover, result.text + logs(project)
    said = [line for line in logs(project).splitlines() if "python prepare_uniref50.py data/uniref50" in line]
    assert len(said) == 1 and "data/uniref50 does not exist" in said[0] and "error: " in said[0], logs(project)
    assert site.deleted() == ["102.site"], "a job that was refused needs no successor"


@pytest.mark.slow
def test_a_pbs_job_stops_by_the_clock_before_its_walltime(pals_site, project):
    site, run_dir = pals_site("aurora.pbs"), project / "runs" / "mine"
    (project / "config.yaml").write_text(CONFIG.replace(f"n_iters: {STEPS}", "n_iters: 1000"))
    with site.start("aurora.pbs", "101.site", on="hostA", SAVE_SECONDS=7200 - 25, CHAIN="0", DDP_MPI4PY="0") as job:
        result = job.wait(timeout=400)
    assert result.returncode == 75 and result.leftover == [], logs(project)
    status = read_status(run_dir)
    assert status["reason"].startswith("DDP_DEADLINE") and steps_saved(run_dir) == status["step"]
    assert "the same qsub again goes on" in logs(project) and "found from MASTER_ADDR" in logs(project)
    assert "size from" not in logs(project), "the number of ranks comes from the job script"


@pytest.mark.slow
def test_a_pbs_job_trains_on_the_hosts_that_pass_the_preflight(pals_site, project):
    site = pals_site("aurora.pbs")
    (project / "slow").unlink()
    break_the_preflight(project, "hostB")
    with site.start("aurora.pbs", "101.site", on="hostA", NODES="1") as job:
        result = job.wait(timeout=400)
    text = logs(project)
    assert result.returncode == 0 and result.leftover == [], text
    assert "suspect hosts: hostB" in text and "leaving out hostB" in text
    assert re.search(r"Initialized DDP: 2 rank\(s\) on 1 host\(s\)(.|\n)*Finished at step 20", text), text


def two_shells(commands, folder, env=None):
    """Both commands at once, the first on hostA and the second on hostB: a Running."""
    both = [[str(launchers.HOST_SHELL), host, "exec " + shlex.join(map(str, words))]
            for host, words in zip(launchers.HOSTS, commands)]
    return Running(both[0], folder, clean_environment(env=env), both[1:])


def multinode(project, **more):
    env = {"PYTHON": sys.executable, "VENV": "none", **SETTINGS, "NNODES": 2, "MASTER_ADDR": "10.77.0.1", **more}
    return two_shells([["env", f"NODE_RANK={rank}", "bash", "jobs/torchrun_multinode.sh"] for rank in (0, 1)],
                      project, env)


def test_the_script_for_hosts_without_a_scheduler_tells_torchrun_where_and_how_many(project):
    """With a Python that writes down what it is asked for."""
    (project / "python").write_text('#!/bin/bash\nif [ "$1" = -c ]; then echo "3 SIGTERM"; exit; fi\n'
                                    'echo "$DDP_WORLD_SIZE $DDP_DEADLINE $*" >> asked\n')
    (project / "python").chmod(0o755)
    env = clean_environment(env={**SETTINGS, "PYTHON": "./python", "VENV": "none", "NNODES": 2, "NODE_RANK": 1,
                                 "MASTER_ADDR": "hostA", "MINUTES": 60, "NPROC": ""})
    before = time.time()
    with Running(["bash", "jobs/torchrun_multinode.sh", "x=1"], project, env) as running:
        result = running.wait(60)
    assert result.returncode == 0, result.text
    (preflight, training) = (line.split() for line in (project / "asked").read_text().splitlines())
    wanted = "-m torch.distributed.run --nnodes=2 --node-rank=1 --master-addr=hostA --master-port={} " \
             "--nproc-per-node=3 --signals-to-handle=SIGTERM "
    assert " ".join(preflight[2:]).startswith(wanted.format(29501) + "test_aurora_ddp.py --preflight")
    assert " ".join(training[2:]) == wanted.format(29500) + "driver.py --config config.yaml --work_dir runs/mine x=1"
    assert training[0] == "6" and before + 3600 - 1 <= int(training[1]) <= time.time() + 3600
    assert result.stdout.splitlines()[-1].endswith("status.json none") and result.stderr == ""
    assert [path.read_text() for path in (project / "logs").glob("mine-1-*.out")] == [result.stdout]


def alone(project, python, **more):
    """That script on a single host, with a program `python` in place of Python: a Running."""
    (project / "python").write_text(f'#!/bin/bash\nif [ "$1" = -c ]; then echo "3 SIGTERM"; exit; fi\n{python}')
    (project / "python").chmod(0o755)
    env = clean_environment(env={**SETTINGS, "PYTHON": "./python", "VENV": "none", "NNODES": 1, "NODE_RANK": 0,
                                 "MASTER_ADDR": "localhost", "NPROC": "", **more})
    return Running(["bash", "jobs/torchrun_multinode.sh"], project, env)


@pytest.mark.parametrize("name, code, passes", [("SIGINT", 130, 1), ("SIGTERM", 143, 1), ("SIGINT", 130, 0)])
def test_a_signal_during_the_preflight_by_hand_ends_it_with_the_signals_own_code_and_nothing_is_trained(
        name, code, passes, project):
    wait = f"echo $* >> asked\ntrap 'exit {passes}' INT TERM\necho checking\nwhile :; do sleep 0.1; done\n"
    with alone(project, wait) as running:
        running.wait_for("checking", timeout=60)
        running.process.send_signal(getattr(signal, name))
        result = running.wait(60)
    assert result.returncode == code and f"{name} during the pre-flight: nothing is trained" in result.stderr, result.text
    asked = (project / "asked").read_text()
    assert asked.count("test_aurora_ddp.py") == 1 and "driver.py" not in asked


def test_cores_are_counted_where_there_is_no_nproc(project):
    (project / "bin").mkdir()
    for program, text in (("nproc", "exit 127"), ("getconf", "echo 8")):
        (project / "bin" / program).write_text(f"#!/bin/bash\n{text}\n")
        (project / "bin" / program).chmod(0o755)
    path = f"{project / 'bin'}{os.pathsep}{os.environ['PATH']}"
    with alone(project, "echo threads $OMP_NUM_THREADS\n", PATH=path, OMP_NUM_THREADS=None) as running:
        result = running.wait(60)
    assert result.returncode == 0 and result.stdout.count("threads 2\n") == 2, result.text    # 8 cores, 3 ranks


@pytest.mark.slow
def test_torchrun_on_two_hosts_stops_at_a_signal_to_one_and_goes_on_by_the_same_commands(two_hosts, project, reference):
    run_dir = project / "runs" / "mine"
    with multinode(project) as running:
        running.wait_for(f"step 7/{STEPS}", timeout=400)
        running.processes[1].send_signal(signal.SIGTERM)
        result = running.wait(timeout=100)
    assert result.returncode == 75 and result.leftover == [], result.text
    saved = steps_saved(run_dir)
    assert read_status(run_dir)["code"] == 75 and saved >= 7 and "the same commands again" in result.stdout
    (project / "slow").unlink()
    with multinode(project) as running:
        result = running.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text
    assert f"continuing from step {saved}" in " ".join(result.stdout.split())
    assert "5 passed, 0 failed" in result.stdout and "4 rank(s) on 2 host(s)" in result.stdout
    check_finished(run_dir, reference)
    written = sorted(path.name for path in (project / "logs").iterdir())
    assert [re.sub(r"\d{8}-\d{6}", "DATE", name) for name in written if "-0-" in name] == [
        "mine-0-DATE.err", "mine-0-DATE.out"] * 2
    assert f"step {STEPS}/{STEPS}" in (project / "logs" / [n for n in written if "-0-" in n and "out" in n][-1]).read_text()


@pytest.mark.slow
def test_the_training_script_starts_itself_on_two_hosts(two_hosts, project, reference):
    words = [sys.executable, "train_sedd_ddp.py", "--config", "config.yaml", "--work_dir", "runs/mine", "--nnodes", "2",
             "--master_addr", "10.77.0.1", "--master_port", "29555", "--nproc_per_node", "2", "--node_rank"]
    with two_shells([[*words, "0"], [*words, "1"]], project) as running:
        result = running.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text
    (project / "runs" / "mine" / "DONE").touch()
    check_finished(project / "runs" / "mine", reference)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "openmpi"])
def test_mpirun_over_two_hosts(launcher, two_hosts, project, reference):
    need(launcher)
    (project / "hosts").write_text("hostA slots=2\nhostB slots=2\n" if launcher == "openmpi" else "hostA\nhostB\n")
    agent = str(launchers.HOST_SHELL)
    start = {"mpich": [Path(sys.prefix, "bin", "mpiexec"), "-launcher", "rsh", "-launcher-exec", agent, "-f", "hosts",
                       "-ppn", "2"],
             "openmpi": [Path(sys.prefix, "mpi", "openmpi", "bin", "mpirun"), "--prtemca", "plm_ssh_agent", agent,
                         "--allow-run-as-root", "--hostfile", "hosts", "--bind-to", "none"]}[launcher]
    words = [*start, "-n", "4", launchers.python_of(launcher), "train_sedd_ddp.py", "--config", "config.yaml",
             "--work_dir", "runs/mine"]
    with Running([agent, "hostA", "exec " + shlex.join(map(str, words))], project, clean_environment(launcher)) as running:
        result = running.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text
    assert "4 rank(s) on 2 host(s)" in result.stdout
    (project / "runs" / "mine" / "DONE").touch()
    check_finished(project / "runs" / "mine", reference)
