"""Do the job scripts train, stop in good order, go on from there and end their chains?

jobs/slurm.sh is submitted to a real Slurm of two nodes on this machine. The PBS scripts run on two
hosts (network namespaces) under a stand-in for the site, whose mpiexec is MPICH with the variables
of PALS. What is decided after a run is tested without ranks: a stand-in for the launcher leaves
status.json, a checkpoint and an exit code.
"""
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import launchers
from ddp_setup import load_checkpoint
from launchers import (
    ROOT,
    Running,
    await_that,
    clean_environment,
    copy_code,
    fork_ranks,
    host_words,
    need,
)
from training_runs import same_run

JOBS = ROOT / "jobs"
ONE_OF_EACH = pytest.mark.parametrize("script", ["aurora.pbs", "slurm.sh"])    # PBS' are equal
PBS_SCRIPTS = ["aurora.pbs", "polaris.pbs", "pbs.sh"]
STEPS = 20
CONFIG = f"""
training: {{batch_size: 4, n_iters: {STEPS}, eval_freq: {STEPS}, log_freq: 1, snapshot_freq: 5}}
optim: {{lr: 3e-3, warmup: 4, ema: 0.9}}
model: {{hidden_size: 32, n_blocks: 1, n_heads: 2, cond_dim: 16, dropout: 0.1}}
data: {{max_length: 48, val_fraction: 0.05, demo_proteins: 300}}
memory: {{mixed_precision: false}}
monitoring: {{n_samples: 1, sample_steps: 2}}
"""
# train_sedd_ddp.py, whose steps take half a second while there is a file `slow`, so that what comes
# from outside meets a run.
DRIVER = """
if __name__ == "__main__":
    import ddp_guard
    ddp_guard.supervise()
import os, sys, time
import train_sedd_ddp
from training import log as run_log
progress = run_log.RunLog.progress
def paced_progress(*values, **more):
    progress(*values, **more)
    if os.path.exists("slow"):
        time.sleep(0.5)
run_log.RunLog.progress = paced_progress
if __name__ == "__main__":
    train_sedd_ddp.main(sys.argv[1:])
"""
# A small share of the median speed counts as slow: the ranks share few cores.
SETTINGS = {"SCRIPT": "driver.py", "CONFIG": "config.yaml", "RUN_DIR": "runs/mine", "NPROC": "2",
            "CPU_BIND": "list:0:1", "PREFLIGHT": "jobs/preflight.py --slow 0.01"}


# ---------------------------------------------------------------- helpers
@pytest.fixture
def project(tmp_path):
    """A copy of the project's files, with a config and script of few steps; a name with a space."""
    folder = tmp_path / "a copy"
    shutil.copytree(JOBS, folder / "jobs")
    copy_code(folder)
    (folder / "driver.py").write_text(DRIVER)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "slow").touch()
    return folder


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


def read_status(run_dir):
    return json.loads((run_dir / "status.json").read_text())


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


def logs(folder):
    return "\n".join(f"--- {path.name}\n{path.read_text()}"
                     for path in sorted([*folder.glob("logs/*"), *folder.glob("slurm-*.out")]))


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


def bash(folder, *words, **env):
    """Run `bash WORDS` in `folder` to its end: a Result."""
    with Running(["bash", *map(str, words)], folder, clean_environment(env=env)) as running:
        return running.wait(60)


# ---------------------------------------------------------------- what stands in them
def test_no_job_script_names_an_account():
    for path in JOBS.iterdir():
        if path.is_file():
            assert not re.search(r"^#(PBS|SBATCH) .*(-A|--account)", path.read_text(), re.M)


@ONE_OF_EACH
def test_a_job_submitted_from_elsewhere_says_from_where_to_submit(script, site, project):
    site.fake_launcher("0 0")
    shutil.rmtree(project / "jobs" / "lib")
    assert site.run(script) == 2
    assert f"in {project}: submit from the project's folder" in site.printed
    assert site.launched() == [] and not (site.folder / "modules").exists()


@pytest.mark.parametrize("name, ranks, reserved", [
    # Cores 0 and 52 are the system's; 42 to 47 and 94 to 99 oneCCL's, 48 to 51 Copper's.
    ("aurora.pbs", 12, {0, 52, *range(42, 52), *range(94, 100)}), ("polaris.pbs", 4, set())])
def test_every_rank_has_cores_of_its_own(name, ranks, reserved):
    spans = re.search(r"CPU_BIND:-list:([\d:-]+)\}", (JOBS / name).read_text())[1].split(":")
    pairs = [map(int, span.split("-")) for span in spans]
    mine = [core for first, last in pairs for core in range(first, last + 1)]
    assert len(spans) == ranks and len(set(mine)) == len(mine) and not set(mine) & reserved


# ---------------------------------------------------------------- functions alone
def shared_function(library, words, **settings):
    """What a shell prints that has read jobs/lib/LIBRARY and runs these words."""
    result = bash(ROOT, "-euc", f"source jobs/lib/{library}; {words}", **settings)
    assert result.returncode == 0, result.text
    return result.stdout


@pytest.mark.parametrize("walltime, seconds", [
    ("12:00:00", 43200), ("08:09:08", 29348), ("09:30", 570), ("0090", 90), ("100:00:00", 360000)])
def test_a_walltime_is_read_as_decimal_numbers(walltime, seconds):
    assert shared_function("pbs.sh", f"seconds_of {walltime}") == f"{seconds}\n"


@pytest.mark.parametrize("save_seconds", [0, 300])
def test_under_slurm_the_run_stops_so_long_before_the_end_of_the_job(save_seconds):
    end = int(time.time()) + 3600
    told = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
    words = f"squeue() {{ echo {told}; }}; set_deadline > /dev/null; echo $DDP_DEADLINE $ends"
    found = shared_function("slurm.sh", words, SLURM_JOB_ID=101, SAVE_SECONDS=save_seconds)
    assert found == f"{end - save_seconds} {end}\n"


# ---------------------------------------------------------------- decisions, no ranks
# In place of mpiexec and srun. A line of `outcomes` per call: what status.json says (-: none), the
# exit code, and perhaps `old` (no new checkpoint), `cancel` (SIGTERM to the job), `late` (the same
# once its time is over), `suspect` (of a pre-flight, which names hostA) or `dies:HOST` (as the
# guard of a rank says it; `early:HOST`: before the ranks have met).
FAKE_LAUNCHER = """#!/bin/bash
echo "$DDP_WORLD_SIZE $*" >> "$SITE/launched"
echo "${DDP_DEADLINE:-}" > "$SITE/deadline"
echo "${MASTER_ADDR:-}:${MASTER_PORT:-}" >> "$SITE/meetings"
env > "$SITE/environment"
read -r status code more <<< "$(sed -n "$(wc -l < "$SITE/launched")p" "$SITE/outcomes")"
[ ! -e "$SITE/next" ] || echo "submitted before the training ended" >> "$SITE/launched"
while [ $# -gt 0 ]; do
  case $1 in --work_dir) run=$2 ;; --hostfile) cp "$2" "$SITE/hosts" ;; esac
  shift
done
mkdir -p "$run/checkpoints"
said="{\\"code\\": $status, \\"reason\\": \\"x\\", \\"step\\": 1}"
if [ "$status" != - ]; then echo "$said" > "$run/status.json"; fi
if [ "$more" = suspect ]; then echo "suspect hosts: hostA"; fi
if [[ $more = dies:* ]]; then
  echo "FAILED: rank 1 of 4 on ${more#dies:}: died (SIGKILL: out of memory?). Last checkpoint: any"
fi
if [[ $more = early:* ]]; then echo "FAILED: rank 1 on ${more#early:}: died without a word"; fi
if [ "$more" != old ]; then echo "$RANDOM" > "$run/checkpoints/last.pt"; fi
if [ "$more" = late ]; then
  until [ "$(date +%s)" -gt "$((DDP_DEADLINE + 1))" ]; do sleep 0.1; done
fi
if [[ $more = cancel || $more = late ]]; then kill -TERM $PPID; fi
exit "$code"
"""
# In place of mpirun: Open MPI's, on a host where a rank inherits no variable of the job.
ELSEWHERE = """#!/bin/bash
echo "$*" >> "$SITE/launched"
until [ "$1" = --bind-to ]; do shift; done
exec env -i PATH=/usr/bin:/bin "${@:3}"
"""
# In place of Python: a rank that notes its variables.
RANK = """#!/bin/bash
if [ "$1" != -c ]; then env > "${0%/bin/*}/environment"; fi
"""
KEYS = {"WANDB_API_KEY": "SECRET1", "HF_TOKEN": "SECRET=2; $x", "MY_PASSWORD": """SECRET"3'"""}
SITE = """
module() { echo "$*" >> "$SITE/modules"; }
conda() { :; }
export PATH=$SITE/bin:$PYTHON_FOLDER:$PATH
"""
# As PBS' own: a name without a value is refused. A job on hold (-h) waits until qdel removes it.
QSUB = """
import json, os, sys
words, names = sys.argv[1:], sys.argv[sys.argv.index("-v") + 1].split(",")
file = "held" if "-h" in words else "next"
with open(os.environ["SITE"] + "/" + file, "w") as f:
    json.dump({"words": words, "variables": {name: os.environ[name] for name in names}}, f)
print("999.site")
"""
QDEL = """#!/bin/bash
echo "$*" >> "$SITE/deleted"
[ "$*" = 999.site ] && rm "$SITE/held"
"""
ATTRIBUTES = """Job Id: 101.site
    Account_Name = AnyProject
    Mail_Points = abe
    Mail_Users = me@any.site
    Resource_List.award = something of the site's own
    Resource_List.filesystems = flare
    Resource_List.ncpus = 416
    Resource_List.place = scatter
    Resource_List.select = 2:sys\n\ttem=any
    Resource_List.software = one
    Resource_List.walltime = 02:00:00
"""


class Site:
    """A stand-in for a PBS site: start() runs a copy of a script from a spool folder, as PBS."""

    def __init__(self, folder, project, hosts):
        self.folder = folder
        self.project = project
        self.hosts = hosts
        self.attributes = ATTRIBUTES
        for name in ("bin", "home", "spool"):
            (folder / name).mkdir(parents=True)
        self.profile("")
        self.submitted = "-A AnyProject -l select=2:system=any,software=one -v X=1 jobs/{script}"
        self.nodes(1)
        self.program("qsub", f"#!{sys.executable}{QSUB}")
        self.program("qdel", QDEL)
        self.program("qstat", '#!/bin/bash\n[ "$1" = -f ] && cat "$SITE/attributes"\n')

    def program(self, name, text):
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def nodes(self, mpiprocs):
        """As PBS writes them: each host so often, once without mpiprocs in `select`."""
        (self.folder / "nodes").write_text("".join(f"{host}\n" * mpiprocs for host in self.hosts))

    def profile(self, more):
        (self.folder / "home" / ".bash_profile").write_text(SITE + more)

    def fake_launcher(self, *outcomes):
        (self.folder / "outcomes").write_text("\n".join(outcomes) + "\n")
        (self.folder / "launched").write_text("")
        for name in ("mpiexec", "mpirun", "srun"):
            self.program(name, FAKE_LAUNCHER)

    def ranks_elsewhere(self):
        """Let pbs.sh start such; environment() is then a rank's. Returns the settings for it."""
        self.fake_launcher()
        self.program("mpirun", ELSEWHERE)
        self.program("rank", RANK)
        self.nodes(2)
        return {"CPU_BIND": None, "NPROC": "", "PYTHON": self.folder / "bin" / "rank"}

    def start(self, script, job, on=None, **given):
        """given: what stands behind qsub -v, with the settings of these tests. on: the host."""
        given = {"THREADS": 1, "VENV": "none", **SETTINGS, **given}
        values = ",".join(f"{name}={value}" for name,
                          value in {"PBS_O_HOME": "/any", **given}.items())
        lines = [f"    Submit_arguments = {self.submitted.format(script=script)}",
                 f"    Variable_List = {values},no_such_name=1"]
        (self.folder / "attributes").write_text(self.attributes + "".join(
            "\n\t".join(textwrap.wrap(line, 70, drop_whitespace=False)) + "\n" for line in lines))
        env = clean_environment(env={
            "SITE": self.folder, "PYTHON_FOLDER": Path(sys.executable).parent,
            "HOME": self.folder / "home", "PBS_JOBID": job, "PBS_JOBNAME": "sedd",
            "PBS_QUEUE": "capacity", "PBS_O_QUEUE": "capacity", "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_NODEFILE": self.folder / "nodes", "PBS_O_WORKDIR": self.project,
            "TMPDIR": "/var/tmp/pbs." + job, "OMP_NUM_THREADS": 208, **given})
        words = ["bash", "-l", str(shutil.copy(self.project / "jobs" / script,
                                               self.folder / "spool" / f"{job}.SC"))]
        return Running(host_words(on, words) if on else words, self.folder / "home", env)

    def run(self, script, job="101.site", **given):
        """To its end, without pre-flight; jobs/slurm.sh too. The exit code; self.printed: more."""
        if script == "slurm.sh":
            return self.run_slurm(**given)
        with self.start(script, job, **{"PREFLIGHT": "", "RETRIES": "0", **given}) as running:
            result = running.wait(600)
        self.printed = result.text
        return result.returncode

    def run_slurm(self, arguments=(), END="NONE", **given):
        (self.folder / "requeued").unlink(missing_ok=True)
        self.program("squeue", f"#!/bin/bash\ncase $* in *%x*) echo n9 ;; *) echo {END} ;; esac\n")
        hosts = shlex.quote("\n".join(self.hosts))
        self.program("scontrol", f'''#!/bin/bash
if [ "$1" = show ]; then echo {hosts}; else echo "$*" >> "$SITE/requeued"; fi
''')
        copy = shutil.copy(self.project / "jobs" / "slurm.sh", self.folder / "spool" / "script")
        result = bash(self.folder, copy, *arguments, **{
            "SITE": self.folder, "SLURM_SUBMIT_DIR": self.project, "SLURM_JOB_ID": "101",
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": 2, "VENV": "none", **SETTINGS,
            "PREFLIGHT": "", "RETRIES": "0", **given})
        self.printed = result.text
        return result.returncode

    def goes_on(self):
        """Was a next job submitted, or this one requeued? Forgets it."""
        requeued = self.folder / "requeued"
        submitted = self.folder / "next"
        answer = submitted.exists() or requeued.exists() and requeued.read_text() == "requeue 101\n"
        submitted.unlink(missing_ok=True)
        return answer

    def environment(self):
        """The variables that the launcher was last started with, or a rank elsewhere."""
        lines = (self.folder / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def launched(self):
        return (self.folder / "launched").read_text().splitlines()


@pytest.fixture
def site(tmp_path, project):
    return Site(tmp_path / "site", project, ("hostA", "hostB"))


@ONE_OF_EACH
def test_what_a_job_does_after_each_end_of_a_run(script, site, project):
    table = [   # status.json's code and the launcher's -> the job's; does it go on under PBS, Slurm
        ("75 143", 75, True, True), ("0 143", 0, False, False),
        ("0 0", 0, False, False), ("70 1", 70, True, True),
        ("2 143", 2, False, False), ("1 1", 1, True, False), ("null 137", 137, True, False),
        ("null 0", 1, True, False),
        # The code of an earlier start, which is still there, does not count.
        ("- 2", 2, False, False), ("- 0", 0, False, False), ("- 75", 75, True, True),
        ("- 143", 143, False, False),
        # No new checkpoint, or told to end; in the debug queues a user may have one job.
        ("75 75 old", 75, False, False), ("75 75 cancel", 75, False, False),
        ("75 75", 75, False, False, dict(CHAIN="0", REQUEUE="0")),
        ("75 75", 75, False, False, dict(AGAIN_ON="70")),
        ("75 75", 75, False, False, dict(AGAIN_ON="")),
        ("75 75", 75, False, True, dict(PBS_QUEUE="debug-scaling"))]
    site.fake_launcher(*(outcome for outcome, *_ in table), "75 75")
    for outcome, code, pbs, slurm, *given in table:
        found = site.run(script, **dict(*given)), site.goes_on(), outcome, given
        wanted = code, slurm if script == "slurm.sh" else pbs, outcome, given
        assert found == wanted, f"{site.printed}{logs(project)}"
    (project / "runs" / "mine" / "STOP").touch()
    site.attributes = ""    # the walltime is not known
    assert site.run(script) == 75 and not site.goes_on(), logs(project)
    log, = (project / "logs").iterdir()
    assert log.name == "config-101.log"
    if script == "aurora.pbs":
        assert (site.folder / "hosts").read_text() == "hostA\nhostB\n"


def test_sigterm_at_the_end_of_the_walltime_does_not_end_the_chain_as_qdel_does(site, project):
    site.attributes = ATTRIBUTES.replace("02:00:00", "00:00:02")
    site.fake_launcher("75 75 late")
    assert site.run("aurora.pbs", SAVE_SECONDS="1") == 75, site.printed + logs(project)
    assert site.goes_on(), logs(project)


def test_the_next_job_comes_from_the_projects_file_with_options_and_variables_of_this_one(
        site, project):
    site.fake_launcher("75 75")
    (project / "jobs" / "aurora.pbs").rename(project / "jobs" / "mine.pbs")
    given = {"ARGS": "training.stop_signals=[SIGTERM,SIGUSR1]\n data.max_length=32", "NPROC": "3",
             "CPU_BIND": "none", "MY_OWN": "a \"b\" \\c, d=1", "PREFLIGHT": ""}
    assert site.run("mine.pbs", **given) == 75, site.printed + logs(project)
    asked = json.loads((site.folder / "next").read_text())
    *words, script = asked["words"]
    assert script == "jobs/mine.pbs", "what was submitted, as it is by then"
    given_there = words[words.index("-v") + 1]
    assert set(zip(words[::2], words[1::2])) == {
        ("-W", "depend=afterany:101.site"), ("-A", "AnyProject"), ("-q", "capacity"),
        ("-l", "select=2:system=any"), ("-l", "walltime=02:00:00"), ("-v", given_there)}
    wanted = {"THREADS": "1", "VENV": "none", "RETRIES": "0", "CHAIN_JOB": "2", **SETTINGS, **given}
    assert asked["variables"] == wanted, "what is not given may be edited"
    launched, = site.launched()
    assert launched.endswith("--config config.yaml --work_dir runs/mine "
                             + given["ARGS"].replace("\n", ""))
    assert launched.startswith("6 -n 6 ")


@ONE_OF_EACH
@pytest.mark.parametrize("given, message", [
    ({"ARGS": "--config=a"}, "holds --config. Give CONFIG="),
    ({"ARGS": "x=1\t--fresh"}, "holds --fresh."), ({"DRY_RUN": "0"}, "DRY_RUN=0 is not a number"),
    ({"CONFIG": "no.yaml"}, "CONFIG=no.yaml is not a file in "),
    ({"SAVE_SECONDS": "10m"}, "SAVE_SECONDS=10m is not a number"),
    ({"SAVE_SECONDS": "7200", "END": "2000-01-01T00:00:00"}, "is not longer than SAVE_SECONDS")])
def test_a_job_refuses_before_it_trains(script, given, message, site, project):
    site.fake_launcher("75 75")
    assert site.run(script, **given) == 2
    assert message in site.printed + logs(project)
    assert site.launched() == [] and not site.goes_on()


def test_arguments_of_sbatch_go_to_the_training_script(site, project):
    site.fake_launcher("0 0")
    assert site.run_slurm(["--data", "a b"], ARGS="x=1") == 0, logs(project)
    launched, = site.launched()
    assert launched.startswith("4 --export=ALL --nodes=2 --ntasks=4 --ntasks-per-node=2 ")
    assert launched.endswith("--work_dir runs/mine x=1 --data a b")
    assert site.run_slurm(["--config", "other.yaml"]) == 2 and "holds --config" in site.printed


@ONE_OF_EACH
def test_a_job_that_was_not_submitted_ends_before_it_loads_modules(script, site, project):
    result = bash(project, "-l", f"jobs/{script}", SITE=site.folder, HOME=site.folder / "home",
                  PYTHON_FOLDER="")
    assert result.returncode == 2 and "submit this with " in result.stderr
    assert not (site.folder / "modules").exists() and not (project / "logs").exists()


@pytest.mark.parametrize("script, line, given", [
    ("aurora.pbs", "mpiexec -n 24 --ppn 12 --hostfile ", {}),
    ("polaris.pbs", "mpiexec -n 8 --ppn 4 --hostfile ", {}),
    ("pbs.sh", "mpirun -n 8 --hostfile ", {}),
    ("slurm.sh", "srun --export=ALL --nodes=2 --ntasks=8 --ntasks-per-node=4 ", {}),
    ("torchrun_multinode.sh",
     "python train_sedd_ddp.py --nnodes 2 --node_rank 0 --nproc_per_node 4 ",
     {"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "hostA", "NPROC": 4}),
    ("local.sh", ".venv/bin/python train_sedd_ddp.py --nproc_per_node 2 ", {})])
def test_a_dry_run_shows_the_launch_line_on_any_machine_and_starts_nothing(script, line, given,
                                                                           site, project):
    shutil.copytree(ROOT / "configs", project / "configs")
    before = sorted(project.rglob("*"))
    result = bash(project, f"jobs/{script}", DRY_RUN=2, HOME=site.folder / "home",
                  ARGS="x=[1,2]\n  y=1", **given)
    shown, = [text for text in result.stdout.splitlines() if text.startswith(line)]
    assert result.returncode == 0 and " --config configs/sedd_" in shown, result.text
    assert shlex.split(shown)[-2:] == ["x=[1,2]", "y=1"], "both lines of ARGS"
    assert sorted(project.rglob("*")) == before


def test_a_dry_run_shows_the_cores_that_a_slurm_job_will_have(project):
    shutil.copytree(ROOT / "configs", project / "configs")
    result = bash(project, "jobs/slurm.sh", DRY_RUN=1, OMP_NUM_THREADS="")
    assert " --cpus-per-task=8 " in result.stdout and "OMP_NUM_THREADS=8\n" in result.stdout


def test_a_dry_run_of_the_tests_shows_their_command_and_installs_nothing(project):
    before = sorted(project.rglob("*"))
    words = "--slow jobs -x --timeout 5"
    result = bash(project, "jobs/test.sh", *words.split(), DRY_RUN=1)
    assert result.returncode == 0 and result.stdout.startswith(".venv/bin/python -m pytest ")
    assert result.stdout.strip().endswith(words)
    assert sorted(project.rglob("*")) == before


@pytest.mark.parametrize("words, message", [
    (["-1"], "NPROC is '-1', expected a number"), (["-n", "4"], "'-n' is no option"),
    (["2", "4"], "'4' is no option")])
def test_a_wrong_word_behind_local_sh_is_refused_before_anything_is_installed(words, message,
                                                                            project):
    shutil.copytree(ROOT / "configs", project / "configs")
    result = bash(project, "jobs/local.sh", *words, DRY_RUN=1, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2 and message in result.stderr and result.stdout == ""


@pytest.mark.parametrize("script, words", [
    ("train_sedd_ddp.py", "--datafile x optim.lr=1 --init_timeout -1 --fresh --help"),
    ("train_sedd_ddp.py", "--work_dir=x --plan 1,2 --device cpu model.dropout=0.1"),
    ("train_dpo_ddp.py", "--lr 1 --num_epochs 2 --mutable_ranges 1-5 6-7 --no_cuda x=1 --beta 1"),
    ("train_mpnn_ddp.py", "--structures pdbs --other_structures x --base_model_name v_48_020")])
def test_words_that_a_training_script_knows_reach_it_from_local_sh(script, words, project):
    shutil.copytree(ROOT / "configs", project / "configs")
    words = words.split()
    result = bash(project, "jobs/local.sh", *words, DRY_RUN=1, SCRIPT=script)
    assert result.returncode == 0, result.text
    assert shlex.split(result.stdout)[-len(words):] == words


def test_local_sh_looks_for_each_of_several_data_files_where_it_was_called(project, tmp_path):
    shutil.copytree(ROOT / "configs", project / "configs")
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).touch()
    words = "--train_data one.csv two.csv --measured one.csv"
    result = bash(tmp_path, project / "jobs/local.sh", *words.split(), DRY_RUN=1,
                  SCRIPT="train_dpo_ddp.py")
    expected = ["--train_data", str(tmp_path / "one.csv"), str(tmp_path / "two.csv"),
                "--measured", "one.csv"]
    assert shlex.split(result.stdout)[-len(expected):] == expected, result.text


def test_local_sh_looks_for_structures_where_it_was_called(project, tmp_path):
    shutil.copytree(ROOT / "configs", project / "configs")
    (tmp_path / "pdbs").mkdir()
    words = "--structures pdbs --other_structures=pdbs --val_structures absent"
    result = bash(tmp_path, project / "jobs/local.sh", *words.split(), DRY_RUN=1,
                  SCRIPT="train_mpnn_ddp.py", CONFIG="configs/mpnn.yaml")
    expected = ["--structures", str(tmp_path / "pdbs"), f"--other_structures={tmp_path / 'pdbs'}",
                "--val_structures", "absent"]
    assert shlex.split(result.stdout)[-len(expected):] == expected, result.text


def test_a_workstation_gets_a_rank_per_gpu(site, project):
    shutil.copytree(ROOT / "configs", project / "configs")
    site.program("nvidia-smi", "#!/bin/bash\necho 'GPU 0: one'\n")
    path = f"{site.folder / 'bin'}:{os.environ['PATH']}"
    for visible, ranks in ((None, 1), ("0,3,5", 3), ("", 2), ("-1", 2)):
        result = bash(project, "jobs/local.sh", DRY_RUN=1, PATH=path, CUDA_VISIBLE_DEVICES=visible)
        assert f" --nproc_per_node {ranks} " in result.stdout, result.text


def test_the_deadline_counts_from_before_modules_and_no_users_file_hides_how_a_job_ends(
        site, project):
    site.fake_launcher("75 143", "75 143")
    (site.folder / "home" / ".bash_logout").write_text("false\n$no_such_variable\n")
    site.profile("module() { sleep 4; }\n")
    before = time.time()
    assert site.run("aurora.pbs", RUN_DIR="runs/mine/", SAVE_SECONDS="900") == 75, logs(project)
    deadline = int((site.folder / "deadline").read_text())
    assert before + 7200 - 900 - 1 <= deadline <= time.time() - 4 + 7200 - 900 + 1
    site.profile("module() { return 1; }\n")
    assert site.run("aurora.pbs") == 2 and len(site.launched()) == 1


def test_a_save_that_crosses_slurms_time_limit_is_not_taken_for_scancel(site, project):
    site.fake_launcher("75 75 late")
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 5))
    assert site.run_slurm(END=end, SAVE_SECONDS="1") == 75, site.printed + logs(project)
    assert site.goes_on(), logs(project)


def test_of_an_array_the_task_is_requeued(site, project):
    site.fake_launcher("75 75")
    assert site.run_slurm(SLURM_ARRAY_JOB_ID=101, SLURM_ARRAY_TASK_ID=3) == 75, logs(project)
    assert (site.folder / "requeued").read_text() == "requeue 101_3\n"


@ONE_OF_EACH
@pytest.mark.parametrize("outcome, given, why", [
    ("0 0", {}, "the training is finished"), ("75 75 cancel", {}, "the job was cancelled"),
    ("75 75 old", {}, "no start in this job wrote a new checkpoint"),
    ("2 2", {}, "the run ended with 2, and AGAIN_ON"),
    ("75 75", {"CHAIN": "0", "REQUEUE": "0"}, " is 0")])
def test_a_job_says_why_it_does_not_go_on(script, outcome, given, why, site, project):
    site.fake_launcher(outcome)
    site.run(script, **given)
    assert re.search(f"(no next job|not requeued): .*{why}", logs(project)), logs(project)


@ONE_OF_EACH
def test_a_job_says_which_settings_came_from_outside(script, site, project):
    site.fake_launcher("0 0")
    assert site.run(script, ARGS="x=1 y=2") == 0, logs(project)
    line = re.search("settings from outside: (.*); all others", logs(project))[1]
    found = dict(word.split("=", 1) for word in shlex.split(line))
    assert found["ARGS"] == "x=1 y=2" and found["CONFIG"] == "config.yaml"
    assert "SAVE_SECONDS" not in found and "AGAIN_ON" not in found


@pytest.mark.parametrize("script", [*PBS_SCRIPTS, "slurm.sh"])
def test_every_setting_at_the_top_of_a_job_is_among_those_that_it_can_name(script):
    shared = (JOBS / "lib" / ("slurm.sh" if script == "slurm.sh" else "pbs.sh")).read_text()
    text = (JOBS / script).read_text()
    named = re.search(r"note_settings ((?:[A-Z0-9_]+|\\?\s)+)", shared)[1].split()
    settings = re.findall(r"^([A-Z0-9_]+)=\$\{\1", text.partition("submit this with")[0], re.M)
    assert set(settings) <= set(named)


@pytest.mark.parametrize("submitted, message", [
    ("-v CONFIG=a.yaml -v ARGS=b jobs/aurora.pbs", "-v was given twice"),
    ("-A AnyProject", "not by 'qsub < FILE'"), ("", "not by 'qsub < FILE'")])
def test_what_no_next_job_could_be_made_from_is_refused_at_the_start(submitted, message, site,
                                                                     project):
    site.fake_launcher("75 75")
    site.submitted = submitted
    assert site.run("aurora.pbs") == 2
    assert message in logs(project) and site.launched() == []
    if "twice" not in message:      # one job alone needs no path
        assert site.run("aurora.pbs", CHAIN=0) == 75, logs(project)


def test_no_job_follows_the_member_of_an_array_which_says_so_at_its_start(site, project):
    site.fake_launcher("75 75")
    assert site.run("aurora.pbs", job="101[2].site", PBS_ARRAY_INDEX=2) == 75, logs(project)
    assert not site.goes_on()
    assert "no next job will follow: this is a member of a job array" in logs(project)


def test_members_of_an_array_on_the_same_hosts_meet_at_ports_of_their_own(site, project):
    site.nodes(2)
    ports = set()
    for index in (1, 2, 3):
        site.fake_launcher("0 0")
        given = {"CPU_BIND": None, "PBS_ARRAY_INDEX": index}
        assert site.run("pbs.sh", job=f"101[{index}].site", **given) == 0, logs(project)
        ports.add(site.environment()["MASTER_PORT"])
    assert len(ports) == 3, ports


def test_ranks_meet_at_the_port_that_is_given(site, project):
    site.nodes(2)
    site.fake_launcher("1 1", "0 0")
    assert site.run("pbs.sh", CPU_BIND=None, RETRIES=1, MASTER_PORT=23456) == 0, logs(project)
    assert site.environment()["MASTER_PORT"] == "23456", "also in the second start"


def test_the_ranks_of_one_host_find_a_port_themselves(site, project):
    site.hosts = ["hostA"]
    site.nodes(2)
    site.fake_launcher("0 0")
    assert site.run("pbs.sh", CPU_BIND=None) == 0, logs(project)
    assert not {"MASTER_ADDR", "MASTER_PORT"} & site.environment().keys()


def test_in_an_interactive_job_the_deadline_counts_from_the_start_of_the_job(site, project):
    site.fake_launcher("75 75")
    began = int(time.time()) - 3600
    site.attributes += f"    stime = {time.ctime(began)}\n"
    site.submitted = "-I -l select=1"
    given = {"PBS_ENVIRONMENT": "PBS_INTERACTIVE", "SAVE_SECONDS": "900"}
    assert site.run("aurora.pbs", **given) == 75, logs(project)
    assert int((site.folder / "deadline").read_text()) == began + 7200 - 900
    assert not site.goes_on() and "this job is interactive" in logs(project)


def test_a_start_of_the_job_that_cannot_be_is_not_believed(site, project):
    site.fake_launcher("75 75")
    site.attributes += f"    stime = {time.ctime(time.time() - 7300)}\n"    # it would be over
    assert site.run("aurora.pbs", SAVE_SECONDS="900") == 75, logs(project)
    assert int((site.folder / "deadline").read_text()) > time.time() + 6000


def test_the_next_job_keeps_umask_priority_and_that_it_may_not_be_rerun(site, project):
    site.fake_launcher("75 75")
    site.attributes += "    Priority = 5\n    Rerunable = False\n    umask = 22\n"
    assert site.run("aurora.pbs") == 75, logs(project)
    words = " ".join(json.loads((site.folder / "next").read_text())["words"])
    assert "-W umask=22" in words and "-p 5" in words and "-r n" in words


def shorten_pauses(site, at_start=300):
    """Of the copy of the project; at_start: seconds in which a job asks a server at its start."""
    lib = site.project / "jobs" / "lib" / "pbs.sh"
    text = lib.read_text()
    for old, new in (("sleep 5\n", "sleep 0.1\n"), ("AT_START=300", f"AT_START={at_start}")):
        assert old in text
        text = text.replace(old, new)
    lib.write_text(text)


# Answers from the call on whose number is in the file `mute`.
MUTE_QSTAT = """#!/bin/bash
echo >> "$SITE/asked"
[ "$(wc -l < "$SITE/asked")" -ge "$(cat "$SITE/mute")" ] && cat "$SITE/attributes"
"""


def mute_until(site, call, at_start=300):
    shorten_pauses(site, at_start)
    (site.folder / "mute").write_text(f"{call}\n")
    site.program("qstat", MUTE_QSTAT)


def test_a_server_that_is_away_at_the_start_is_asked_again(site, project):
    site.fake_launcher("75 75")
    mute_until(site, 3)
    assert site.run("aurora.pbs", SAVE_SECONDS="900") == 75, logs(project)
    assert int((site.folder / "deadline").read_text()) < time.time() + 7200 - 900
    assert site.goes_on(), logs(project)


def test_with_walltime_a_job_starts_at_once_and_asks_the_server_at_its_end(site, project):
    site.fake_launcher("75 75")
    mute_until(site, 3)      # twice at the end
    before = time.time()
    assert site.run("aurora.pbs", WALLTIME="1:00:00") == 75, logs(project)
    deadline = int((site.folder / "deadline").read_text())
    assert before + 3600 - 600 - 1 <= deadline <= time.time() + 3600 - 600
    assert site.goes_on(), logs(project)


def test_a_server_that_never_answers_is_asked_until_shortly_before_the_end_of_the_job(site,
                                                                                     project):
    site.fake_launcher("75 75")
    mute_until(site, 1000)
    before = time.time()
    assert site.run("aurora.pbs", WALLTIME="42", SAVE_SECONDS="1") == 75, logs(project)
    assert time.time() < before + 42 and not site.goes_on()
    assert "not submitted: give the same qsub again" in logs(project)


def test_a_qsub_whose_server_is_away_is_tried_again(site, project):
    site.fake_launcher("75 75")
    shorten_pauses(site)
    site.program("qsub", f"""#!/bin/bash
echo >> "$SITE/tried"
[ "$(wc -l < "$SITE/tried")" -ge 4 ] && exec {sys.executable} "$SITE/bin/real_qsub" "$@"
echo "qsub: cannot connect to server" >&2
exit 1
""")
    site.program("real_qsub", QSUB)
    site.program("qstat", """#!/bin/bash
[ ! -e "$SITE/tried" ] && cat "$SITE/attributes"
""")
    assert site.run("aurora.pbs") == 75, logs(project)
    assert site.goes_on(), logs(project)


REFUSING_QSUB = """#!/bin/bash
echo >> "$SITE/tried"
echo "qsub: Bad UID for job execution" >&2
exit 1
"""


def test_a_qsub_that_is_refused_is_tried_no_more_than_twice(site, project):
    site.fake_launcher("75 75")
    shorten_pauses(site)
    site.program("qsub", REFUSING_QSUB)
    assert site.run("aurora.pbs", CHAIN_JOB=2) == 75, logs(project)
    assert len((site.folder / "tried").read_text()) == 2
    assert "not submitted: give the same qsub again" in logs(project)


def test_a_server_that_comes_back_right_after_a_qsub_has_failed_gets_the_next_job(site, project):
    site.fake_launcher("75 75")
    shorten_pauses(site)
    site.program("qsub", f"""#!/bin/bash
[ -e "$SITE/tried" ] && exec {sys.executable} "$SITE/bin/real_qsub" "$@"
touch "$SITE/tried"
exit 1
""")
    site.program("real_qsub", QSUB)
    assert site.run("aurora.pbs", CHAIN_JOB=2) == 75, logs(project)
    assert site.goes_on(), logs(project)


def test_a_host_that_may_not_submit_jobs_says_so_before_the_run_starts(site, project):
    site.fake_launcher("75 75")
    shorten_pauses(site)
    site.program("qsub", REFUSING_QSUB)
    assert site.run("aurora.pbs") == 75, logs(project)
    before_the_run = logs(project).partition("stops and saves at")[0]
    assert "Bad UID" in before_the_run and "could not submit a next job" in before_the_run


def test_the_trial_whether_a_host_may_submit_jobs_leaves_none(site, project):
    site.fake_launcher("0 0")
    assert site.run("aurora.pbs") == 0, logs(project)
    assert (site.folder / "deleted").read_text() == "999.site\n"
    assert not (site.folder / "held").exists() and not site.goes_on(), logs(project)


@pytest.mark.parametrize("given", [{"CHAIN": 0}, {"CHAIN_JOB": 2}])
def test_a_job_that_no_other_follows_or_that_a_host_has_submitted_makes_no_trial(given, site,
                                                                                  project):
    site.fake_launcher("0 0")
    assert site.run("aurora.pbs", **given) == 0 and not (site.folder / "deleted").exists()


def test_where_the_server_does_not_answer_the_deadline_is_that_of_the_scripts_own_walltime(
        site, project):
    site.fake_launcher("75 75")
    mute_until(site, 2, at_start=0)
    before = time.time()
    assert site.run("aurora.pbs") == 75, logs(project)
    deadline = int((site.folder / "deadline").read_text())
    assert before - 1 <= deadline - (12 * 3600 - 600) <= time.time()
    assert "it is taken to be 12:00:00" in logs(project)
    assert site.goes_on(), "asked again at the end"


def test_a_second_start_in_a_job_asks_again_for_the_walltime(site, project):
    site.fake_launcher("1 1", "75 75")
    mute_until(site, 2, at_start=0)
    before = time.time()
    assert site.run("aurora.pbs", RETRIES=1) == 75, logs(project)
    deadline = int((site.folder / "deadline").read_text())
    assert before - 1 <= deadline - (2 * 3600 - 600) <= time.time()


def test_a_walltime_that_is_no_time_is_refused(site, project):
    site.fake_launcher("75 75")
    assert site.run("aurora.pbs", WALLTIME="1 day") == 2 and site.launched() == []
    assert "WALLTIME=1 day is not a time such as 12:00:00" in site.printed


def test_a_job_without_torch_says_so_and_starts_no_rank(site, project):
    site.fake_launcher("0 0")
    site.program("python", f"#!/bin/bash\nexec {sys.executable} -S -I \"$@\"\n")
    assert site.run("aurora.pbs", PYTHON=site.folder / "bin" / "python") == 2, logs(project)
    assert "has no torch" in logs(project) and site.launched() == []


def test_the_walltime_that_qstat_tells_counts_more_than_the_setting(site, project):
    site.fake_launcher("75 75")
    assert site.run("aurora.pbs", WALLTIME="1:00:00") == 75, logs(project)
    assert int((site.folder / "deadline").read_text()) > time.time() + 6000


# ---------------------------------------------------------------- a start in the same job
def ranks_started(site):
    return [int(line.split()[0]) for line in site.launched()]


@ONE_OF_EACH
@pytest.mark.parametrize("outcome, given, ranks", [
    ("1 1 dies:hostB", {}, [4, 2]), ("70 1 dies:hostB.any.domain", {}, [4, 2]),
    # PALS ends with 143 after any failure: no sign of the walltime, nor is a SIGKILL.
    ("null 143 dies:hostA", {}, [4, 2]), ("null 137", {}, [4, 4]), ("1 143 dies:hostC", {}, [4, 4]),
    ("0 0", {}, [4]), ("75 75", {}, [4]), ("130 1", {}, [4]), ("2 143", {}, [4]),
    # Without status.json it has not begun; PALS' 143 may then be a refusal.
    ("- 1 dies:hostB", {}, [4, 2]), ("- 1 early:hostB", {}, [4, 2]), ("- 143", {}, [4]),
    ("- 2", {}, [4]),
    ("1 1 cancel", {}, [4]), ("1 1 dies:hostB", {"RETRIES": "0"}, [4]),
    # Of two hours, less than five minutes are left until the run has to save.
    ("1 1 dies:hostB", {"SAVE_SECONDS": "7000", "END": 7200}, [4])])
def test_a_run_that_failed_starts_again_without_the_host_at_fault(script, outcome, given, ranks,
                                                                  site, project):
    site.fake_launcher(outcome, "0 0")
    given = {"RETRIES": "1", **given}
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + given.pop("END", 7200)))
    if script == "slurm.sh":
        given["END"] = end
    site.run(script, **given)
    assert ranks_started(site) == ranks, logs(project)
    assert ("starting again (1 of 1)" in logs(project)) == (len(ranks) == 2)


@ONE_OF_EACH
def test_a_run_starts_again_no_more_than_retries_times_and_then_the_chain_decides(script, site,
                                                                                  project):
    site.fake_launcher("70 1 dies:hostB", "70 1 dies:hostA")
    assert site.run(script, RETRIES="1") == 70, logs(project)
    assert ranks_started(site) == [4, 2] and site.goes_on(), logs(project)
    assert "not started again in this job: RETRIES is 1" in logs(project)


@ONE_OF_EACH
def test_a_checkpoint_of_the_first_start_counts_for_the_chain(script, site, project):
    site.fake_launcher("70 1", "70 1 old")
    assert site.run(script, RETRIES="1") == 70 and site.goes_on(), logs(project)


@ONE_OF_EACH
def test_a_run_starts_on_the_hosts_that_the_preflight_does_not_suspect(script, site, project):
    site.fake_launcher("- 3 suspect", "- 0", "0 0")
    assert site.run(script, RETRIES="1", PREFLIGHT="jobs/preflight.py") == 0, logs(project)
    assert ranks_started(site) == [4, 2, 2], logs(project)
    kinds = ["jobs/preflight.py" in line for line in site.launched()]
    assert kinds == [True, True, False]
    if script == "aurora.pbs":
        assert (site.folder / "hosts").read_text() == "hostB\n"
    else:
        assert " --nodes=1 --exclude=hostA --ntasks=2 " in site.launched()[-1]


@ONE_OF_EACH
@pytest.mark.parametrize("preflight, outcomes, code, ranks", [
    ("", ["null 137 dies:hostA", "0 0"], 0, [2, 2]),
    ("jobs/preflight.py", ["- 3 suspect"], 3, [2])])
def test_on_its_only_host_a_run_starts_again_unless_the_preflight_suspects_it(
        script, preflight, outcomes, code, ranks, site, project):
    site.hosts = ["hostA"]
    site.nodes(1)
    site.fake_launcher(*outcomes)
    assert site.run(script, RETRIES="1", PREFLIGHT=preflight) == code, logs(project)
    assert ranks_started(site) == ranks, logs(project)


def test_the_ranks_that_are_left_meet_on_a_host_that_is_left(site, project):
    site.hosts = ["hostA", "hostB", "hostC"]
    site.nodes(2)
    site.fake_launcher("1 1 dies:hostA", "0 0")
    assert site.run("pbs.sh", RETRIES="1", CPU_BIND=None) == 0, logs(project)
    meetings = (site.folder / "meetings").read_text().split()
    (first, first_port), (second, second_port) = [place.split(":") for place in meetings]
    assert (first, second) == ("hostA", "hostB") and first_port != second_port
    assert (site.folder / "hosts").read_text() == "hostB\nhostB\nhostC\nhostC\n"


def test_the_next_start_by_slurm_is_without_the_hosts_that_the_job_has_left_out(site, project):
    site.fake_launcher("70 1 dies:hostA", "75 75")
    assert site.run_slurm(RETRIES="1", EXCLUDE="1") == 75, logs(project)
    requests = (site.folder / "requeued").read_text()
    assert requests == "requeue 101\nupdate JobId=101 ExcNodeList=n9,hostA\n", logs(project)


@ONE_OF_EACH
@pytest.mark.parametrize("number, goes_on", [(2, True), (3, False)])
def test_a_chain_ends_after_max_jobs(script, number, goes_on, site, project):
    site.fake_launcher("75 75")
    given = {"CHAIN_JOB": number, "SLURM_RESTART_COUNT": number - 1, "MAX_JOBS": 3}
    assert site.run(script, **given) == 75, logs(project)
    assert site.goes_on() == goes_on, logs(project)
    assert ("MAX_JOBS is 3" in logs(project)) != goes_on


def test_the_next_job_knows_its_number_in_the_chain(site, project):
    site.fake_launcher("75 75")
    assert site.run("aurora.pbs", CHAIN_JOB=7) == 75, logs(project)
    assert json.loads((site.folder / "next").read_text())["variables"]["CHAIN_JOB"] == "8"


@pytest.mark.parametrize("given, requests", [
    ({"EXCLUDE": "1"}, "requeue 101\nupdate JobId=101 ExcNodeList=n9,hostA\n"), ({}, "")])
def test_a_host_that_the_preflight_suspects_is_left_out_of_the_next_start_if_asked(
        given, requests, site, project):
    site.fake_launcher("- 3 suspect")
    assert site.run_slurm(PREFLIGHT="jobs/preflight.py", **given) == 3, logs(project)
    requeued = site.folder / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == requests, logs(project)


@pytest.mark.parametrize("outcome, given, why", [
    ("- 3", {}, "suspects no single host"),
    ("- 3 suspect", {"MAX_JOBS": 1}, "MAX_JOBS is 1"),
    ("- 3 suspect", {"REQUEUE": "0"}, "REQUEUE is 0")])
def test_a_job_says_why_no_host_is_left_out(outcome, given, why, site, project):
    site.fake_launcher(outcome)
    assert site.run_slurm(PREFLIGHT="jobs/preflight.py", EXCLUDE="1", **given) == 3, logs(project)
    assert not site.goes_on() and why in logs(project)


def test_a_pbs_job_names_the_hosts_that_the_preflight_suspects(site, project):
    site.fake_launcher("- 3 suspect")
    assert site.run("aurora.pbs", PREFLIGHT="jobs/preflight.py") == 3, logs(project)
    assert "no next job: the pre-flight suspects hostA" in logs(project)
    assert not site.goes_on()


def test_the_plugin_of_polaris_for_nccl_has_its_libraries(site, project, tmp_path):
    site.fake_launcher("0 0")
    assert site.run("polaris.pbs", NCCL_PLUGIN_DIR=tmp_path, LD_LIBRARY_PATH="/any") == 0
    found = site.environment()
    assert found["LD_LIBRARY_PATH"] == f"/soft/libraries/hwloc/lib:{tmp_path}:/any"
    assert found["NCCL_NET"] == "AWS Libfabric" and "plain sockets" not in logs(project)


def test_a_job_on_polaris_without_the_plugin_says_that_sockets_are_used(site, project):
    site.fake_launcher("0 0")
    assert site.run("polaris.pbs", NCCL_PLUGIN_DIR="/no/such") == 0, logs(project)
    assert "NCCL uses plain sockets: there is no folder NCCL_PLUGIN_DIR=/no/such" in logs(project)
    assert "NCCL_NET" not in site.environment()


def test_a_job_of_any_pbs_site_gives_its_ranks_slots(site, project):
    site.fake_launcher("75 75")
    site.nodes(2)
    assert site.run("pbs.sh", CPU_BIND=None, NPROC="") == 75 and site.goes_on(), logs(project)
    assert (site.folder / "hosts").read_text() == "hostA\nhostA\nhostB\nhostB\n"


def test_a_job_of_any_pbs_site_gives_ranks_on_other_hosts_what_it_sets(site, project):
    started = time.time()
    given = site.ranks_elsewhere()
    assert site.run("pbs.sh", WANDB_MODE="online", **given) == 0, logs(project)
    found = site.environment()
    wanted = {"DDP_WORLD_SIZE": "4", "MASTER_ADDR": "hostA", "MASTER_PORT": "20101",
              "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp", "WANDB_MODE": "online"}
    assert wanted.items() <= found.items(), found
    assert int(found["DDP_DEADLINE"]) > started


def test_more_ranks_than_pbs_has_slots_for_are_refused(site, project):
    site.fake_launcher("0 0")
    assert site.run("pbs.sh", CPU_BIND=None, NPROC="2") == 2 and site.launched() == []
    assert "PBS lists hostA fewer times" in logs(project)
    assert "-l select=...:mpiprocs=2" in logs(project)


def test_a_host_with_fewer_slots_than_the_first_one_is_named(site, project):
    site.fake_launcher("0 0")
    (site.folder / "nodes").write_text("hostA\nhostA\nhostB\n")
    assert site.run("pbs.sh", CPU_BIND=None, NPROC="") == 2 and site.launched() == []
    assert "NPROC=2, but PBS lists hostB fewer times" in logs(project)


@pytest.mark.parametrize("given, qstat_answers", [
    ({"MY_OWN": "a=b, c"}, True), ({"GLOO_SOCKET_IFNAME": "hsn0"}, False)])
def test_variables_that_are_no_settings_reach_ranks_on_other_hosts(given, qstat_answers, site,
                                                                   project):
    more = site.ranks_elsewhere()
    if not qstat_answers:
        site.program("qstat", "#!/bin/bash\nexit 1\n")
    assert site.run("pbs.sh", WALLTIME="1:00:00", **more, **given) == 0, logs(project)
    assert given.items() <= site.environment().items()


@pytest.mark.parametrize("script", [*PBS_SCRIPTS, "slurm.sh"])
def test_ranks_get_keys_that_no_command_line_or_output_shows(script, site, project):
    """The launchers of the others pass all of their own variables."""
    site.fake_launcher("75 75")
    more = site.ranks_elsewhere() if script == "pbs.sh" else {}
    site.run(script, **more, **KEYS)
    assert KEYS.items() <= site.environment().items(), logs(project)
    dry_run = bash(project, f"jobs/{script}", DRY_RUN=2, HOME=site.folder / "home",
                   **{**SETTINGS, **KEYS, "DDP_TOKEN": "SECRET4"})
    assert dry_run.returncode == 0 and "DDP_WORLD_SIZE=4" in dry_run.stdout, dry_run.text
    submitted = site.folder / "next"
    words = json.loads(submitted.read_text())["words"] if submitted.exists() else []
    assert "SECRET" not in "\n".join([*site.launched(), *words, dry_run.text, site.printed,
                                      logs(project)])


def test_intel_mpi_under_pbs_puts_ranks_that_follow_each_other_on_one_host(site, project):
    site.fake_launcher("0 0")
    site.nodes(2)
    assert site.run("pbs.sh", CPU_BIND=None, NPROC="") == 0, logs(project)
    assert site.environment()["I_MPI_PERHOST"] == "2"


def test_a_setting_of_slurm_that_pbs_cannot_follow_is_refused(site, project):
    site.fake_launcher("0 0")
    assert site.run("aurora.pbs", EXCLUDE=1) == 2 and site.launched() == []
    assert "EXCLUDE is for Slurm" in site.printed


def test_a_job_without_its_launcher_says_so(site, project):
    site.fake_launcher("0 0")
    (site.folder / "bin" / "mpiexec").unlink()
    site.profile("export PATH=$SITE/bin:/usr/bin:/bin\n")      # our own .venv has MPICH's
    assert site.run("aurora.pbs", PYTHON=sys.executable) == 2, logs(project)
    assert "there is no mpiexec on PATH" in logs(project)


@ONE_OF_EACH
@pytest.mark.parametrize("printed, says_so", [
    ("not enough slots", True), ("PASS  place", False), ("FAIL  set-up", False)])
def test_a_preflight_whose_launcher_does_not_start_says_that_nothing_was_checked(
        script, printed, says_so, site, project):
    site.fake_launcher("- 1")
    for name in ("mpiexec", "srun"):
        site.program(name, f"#!/bin/bash\necho '{printed}'\nexit 1\n")
    assert site.run(script, PREFLIGHT="jobs/preflight.py") == 3, logs(project)
    assert ("nothing was checked" in logs(project)) == says_so


@pytest.mark.parametrize("script", [*PBS_SCRIPTS, "slurm.sh", "torchrun_multinode.sh"])
@pytest.mark.parametrize("given, words", [
    ("shifter --image=any/one:1 python", ["shifter", "--image=any/one:1", "python"]),
    ("{folder}/my python", ["{folder}/my python"])])      # one path, with a blank
def test_python_may_be_several_words(script, given, words, site, project):
    shutil.copytree(ROOT / "configs", project / "configs")
    site.program("my python", "")
    folder = str(site.folder / "bin")
    result = bash(project, f"jobs/{script}", DRY_RUN=1, PYTHON=given.format(folder=folder),
                  NNODES=1, NODE_RANK=0, MASTER_ADDR="hostA", NPROC=None if "pbs" in script else 1)
    shown, = [line for line in result.stdout.splitlines() if "train_sedd_ddp.py" in line]
    shown = shlex.split(shown)
    shown = [word for word in shown[:shown.index("train_sedd_ddp.py")] if word != "-u"]
    assert shown[-len(words):] == [word.format(folder=folder) for word in words], result.text


@pytest.mark.parametrize("script, given", [("aurora.pbs", {"NPROC": "6"}),
                                           ("polaris.pbs", {"CPU_BIND": "list:0:1"})])
def test_a_list_of_cores_for_another_number_of_ranks_is_refused(script, given, project):
    shutil.copytree(ROOT / "configs", project / "configs")
    result = bash(project, f"jobs/{script}", DRY_RUN=1, **given)
    assert result.returncode == 2 and "but CPU_BIND=list:" in result.stderr, result.text
    assert bash(project, f"jobs/{script}", DRY_RUN=1, **{**given, "CPU_BIND": "none"}
                ).returncode == 0


def test_a_job_says_that_only_its_owner_can_read_what_it_writes(site, project):
    site.fake_launcher("0 0", "0 0")
    site.profile("umask 0077\n")
    assert site.run("aurora.pbs") == 0 and "umask 0077: nobody else" in logs(project)


def test_a_signal_of_slurm_during_the_preflight_is_no_failure_of_the_machine(site, project):
    site.fake_launcher("- 138 old")
    assert site.run_slurm(PREFLIGHT="jobs/preflight.py") == 75, logs(project)
    assert len(site.launched()) == 1 and not site.goes_on()


@ONE_OF_EACH
def test_nothing_is_trained_after_a_job_was_cancelled_during_the_preflight(script, site, project):
    site.fake_launcher("- 0 cancel")
    assert site.run(script, PREFLIGHT="jobs/preflight.py") == 143, logs(project)
    assert len(site.launched()) == 1 and not site.goes_on()


@ONE_OF_EACH
def test_nothing_is_trained_after_a_preflight_that_failed(script, site, project):
    for ends, code in ((143, 3), (2, 2)):      # 2: its arguments were refused
        site.fake_launcher(f"- {ends}")
        assert site.run(script, PREFLIGHT="jobs/preflight.py --slow 0.1") == code, logs(project)
        launched, = site.launched()
        assert "jobs/preflight.py --slow 0.1 --work_dir runs/mine" in launched
        assert not site.goes_on()


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


@pytest.mark.slow
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
    for text, times in (("launcher Slurm step: rank 0 of 4", 5),
                        (" passed, 0 failed", 2), ("the run stops and saves at", 3)):
        assert logs(project).count(text) == times, f"{text}\n{logs(project)}"
    for step in (cancelled, saved):
        assert f"continuing from step {step}" in " ".join(logs(project).split()), logs(project)
    check_finished(run_dir, reference)


@pytest.mark.slow
def test_after_a_killed_rank_a_slurm_job_goes_on_without_its_host(slurm, project):
    with SlurmJob(project, PREFLIGHT="") as job:
        await_step(project, 7, job.alive)
        os.kill(rank_process(job, "SLURM_PROCID=3"), signal.SIGKILL)
        await_that(lambda: "starting again (1 of 1) on n1, without n2" in logs(project), 120,
                   lambda: logs(project))
        (project / "slow").unlink()
        job.await_state("COMPLETED", "FAILED", "CANCELLED")
        assert job.told("JobState") == "COMPLETED" and job.told("Restarts") == "0", logs(project)
    text = " ".join(logs(project).split())
    assert "continuing from step 5" in text and "2 rank(s) on 1 host(s)" in text, text
    assert steps_saved(project / "runs" / "mine") == STEPS


@pytest.mark.slow
def test_slurm_leaves_a_suspected_host_out_of_the_next_start(slurm, project):
    (project / "jobs" / "preflight.py").write_text(
        "import os, sys\nprint('suspect hosts:', os.environ['SLURMD_NODENAME'])\nsys.exit(3)\n")
    one = ["--nodes=1", "--ntasks-per-node=1"]
    with SlurmJob(project, one, EXCLUDE="1", NPROC="1") as job:
        await_that(lambda: job.told("Restarts") == "1", 60, lambda: logs(project))
        first = re.search("on (n[12])", logs(project))[1]
        await_that(lambda: job.told("ExcNodeList") == first, 60, lambda: logs(project))


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


@pytest.mark.slow
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

    asked = json.loads((site.folder / "next").read_text())
    assert site.goes_on()
    (project / "slow").unlink()
    with site.start(asked["words"][-1].removeprefix("jobs/"), "103.site", on="hostA",
                    **asked["variables"]) as job:
        result = job.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text + logs(project)
    assert not site.goes_on(), "a finished run needs no next job"
    check_finished(run_dir, reference)


@pytest.mark.slow
def test_after_a_killed_rank_a_pbs_job_starts_again_and_finishes(pals_site, project):
    site = pals_site
    with site.start("aurora.pbs", "101.site", on="hostA", PREFLIGHT="") as job:
        await_step(project, 7, lambda: job.process.poll() is None)
        os.kill(rank_process(job, "PALS_RANKID=3"), signal.SIGKILL)
        (project / "slow").unlink()
        result = job.wait(timeout=400)
    assert result.returncode == 0 and result.leftover == [], result.text + logs(project)
    assert "starting again (1 of 1) on hostA, without hostB" in logs(project)
    assert "continuing from step 5" in " ".join(logs(project).split()), logs(project)
    assert not site.goes_on() and steps_saved(project / "runs" / "mine") == STEPS


MULTINODE = {**SETTINGS, "VENV": "none", "NNODES": 2, "MASTER_ADDR": "10.77.0.1"}


def multinode(project, **more):
    """jobs/torchrun_multinode.sh at once on hostA and hostB: a Running."""
    env = clean_environment(env={**MULTINODE, "PYTHON": sys.executable, **more})
    both = [host_words(host, ["env", f"NODE_RANK={rank}", "bash", "jobs/torchrun_multinode.sh"])
            for rank, host in enumerate(launchers.HOSTS)]
    return Running(both[0], project, env, both[1:])


def test_the_script_for_hosts_without_a_scheduler_refuses_what_it_sets_itself_or_lacks(project):
    for place, message in (({"NODE_RANK": 1}, "holds --nnodes."),
                           ({}, "NODE_RANK or MASTER_ADDR is not set")):
        result = bash(project, "jobs/torchrun_multinode.sh", "--nnodes=3", **MULTINODE, **place)
        assert result.returncode == 2 and message in result.stderr and result.stdout == ""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_nothing_is_trained_after_a_signal_during_the_preflight_by_hand(name, site, project):
    site.program("python", """#!/bin/bash
if [ "$1" = -c ]; then echo 3; exit; fi
echo $* >> asked
trap 'exit 1' INT TERM
echo checking
while :; do sleep 0.1; done
""")
    env = {**MULTINODE, "PYTHON": site.folder / "bin" / "python", "NODE_RANK": 1, "NPROC": ""}
    with Running(["bash", "jobs/torchrun_multinode.sh"], project,
                 clean_environment(env=env)) as running:
        running.wait_for("checking", timeout=600)
        os.killpg(running.process.pid, getattr(signal, name))      # as a terminal does
        result = running.wait(600)
    asked, = (project / "asked").read_text().splitlines()
    assert result.returncode == 128 + getattr(signal, name), result.text
    assert asked.endswith("jobs/preflight.py --slow 0.01"), result.text


@pytest.mark.slow
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


@pytest.mark.slow
def test_ranks_on_two_hosts_get_keys_that_no_command_line_shows(mpi_site, project):
    (project / "driver.py").write_text("""
import json, os, pathlib, socket, time
time.sleep(1)    # in which the test sees its command line
pathlib.Path(f"{socket.gethostname()}-{os.getpid()}.rank").write_text(json.dumps(dict(os.environ)))
""")
    seen = set()
    with mpi_site.start("pbs.sh", "101.site", on="hostA", PREFLIGHT="", NPROC="", **KEYS) as job:
        def ended():
            seen.update(map(launchers.command_of, job.pids()))
            return job.process.poll() is not None
        await_that(ended, 300, lambda: logs(project))
        result = job.wait(60)
    assert result.returncode == 0 and result.leftover == [], result.text + logs(project)
    ranks = sorted(project.glob("*.rank"))
    assert [path.name[:5] for path in ranks] == ["hostA", "hostA", "hostB", "hostB"]
    for path in ranks:
        assert KEYS.items() <= json.loads(path.read_text()).items(), path
    assert any(" driver.py " in command for command in seen), seen
    assert "SECRET" not in "\n".join([*seen, result.text, logs(project)])


@pytest.mark.slow
def test_the_launch_line_of_any_pbs_site_starts_ranks_on_two_hosts(mpi_site, project, reference):
    (project / "slow").unlink()
    with mpi_site.start("pbs.sh", "101.site", on="hostA", PREFLIGHT="", NPROC="") as job:
        result = job.wait(timeout=400)
    text = logs(project)
    assert result.returncode == 0 and result.leftover == [], result.text + text
    assert "4 rank(s) on 2 host(s)" in text and "found from MASTER_ADDR" in text, text
    check_finished(project / "runs" / "mine", reference)
