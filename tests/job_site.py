"""A stand-in for a site with PBS and Slurm, for the tests of job scripts.

What is decided after a run is tested without ranks: a stand-in for the launcher leaves status.json,
a checkpoint and an exit code. tests/jobs/conftest.py has the fixtures `project` and `site`.
"""
import json
import os
import shutil
import sys
from pathlib import Path

from launchers import Running, clean_environment, host_words

PBS_SCRIPTS = ["aurora.pbs", "polaris.pbs", "pbs.sh"]
SLURM_SCRIPTS = ["slurm.sh", "perlmutter.sh"]
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
DRIVER = """# It has training.micro_batches.
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

# In place of mpiexec and srun. A line of `outcomes` per call: what status.json says (-: none), the
# exit code, and perhaps `old` (no new checkpoint), `stop` (a file STOP), `cancel` (SIGTERM to the
# job), `late` (the same once its time is over), `suspect` (of a pre-flight, which names hostA), or
# what the guard of a rank says: `dies:HOST`, `early:HOST` before the ranks have met, `leaving:HOST`
# after the run has said how it ends, `hangs:HOST`
# (or `HOST,HOST`), `loads:HOST` (a hang before the first step), `raises:HOST`.
FAKE_LAUNCHER = """#!/bin/bash
echo "$DDP_WORLD_SIZE $*" >> "$SITE/launched"
echo "${DDP_DEADLINE:-}" > "$SITE/deadline"
echo "${MASTER_ADDR:-}" >> "$SITE/meetings"
env > "$SITE/environment"
ulimit -c > "$SITE/core"
read -r status code more <<< "$(sed -n "$(wc -l < "$SITE/launched")p" "$SITE/outcomes")"
[ ! -e "$SITE/next" ] || echo "submitted before the training ended" >> "$SITE/launched"
while [ $# -gt 0 ]; do
  case $1 in --work_dir) run=$2 ;; --hostfile) cp "$2" "$SITE/hosts" ;; esac
  shift
done
mkdir -p "$run/checkpoints"
host=${more#*:}
suspects=
case $more in
  suspect) echo "suspect hosts: hostA" ;;
  dies:*)
    echo "FAILED: rank 1 of 4 on $host: died without a word (SIGKILL). No checkpoint"
    suspects=$host
    ;;
  early:* | leaving:*) echo "FAILED: rank 1 on $host: died without a word" ;;
  raises:*) echo "FAILED: rank 1 of 4 on $host: ValueError: no. Last checkpoint: any" ;;
  loads:*) echo "FAILED: rank 0 of 4 on $host: no progress for 8 s, last step None. See above" ;;
  hangs:*,*) echo "FAILED: 4 ranks on 2 hosts: no progress for 8 s. Late: rank 0 on $host" ;;
  hangs:*)
    echo "FAILED: rank 1 of 4 on $host: no progress for 8 s. Late: rank 1 on $host, last step 4"
    suspects=$host
    ;;
esac
said="{\\"code\\": $status, \\"reason\\": \\"a\\", \\"suspects\\": \\"$suspects\\", \\"step\\": 1}"
if [ "$status" != - ]; then echo "$said" > "$run/status.json"; fi
if [ "$more" != old ]; then echo "$RANDOM" > "$run/checkpoints/last.pt"; fi
if [ "$more" = stop ]; then touch "$run/STOP"; fi
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
stat -c %a "$6" > "$SITE/mode"
exec env -i PATH=/usr/bin:/bin "${@:3}"
"""
# In place of Python: a rank that notes its variables.
RANK = """#!/bin/bash
if [ "$1" != -c ]; then env > "${0%/bin/*}/environment"; fi
"""
KEYS = {"WANDB_API_KEY": "SECRET1", "HF_TOKEN": "SECRET=2; $x", "MY_PASSWORD": """SECRET"3'"""}
SITE = """
module() { echo "module $*"; echo "$*" >> "$SITE/modules"; }
conda() { :; }
export PATH=$SITE/bin:$PYTHON_FOLDER:$PATH
"""
# As PBS' own: a name without a value is refused.
QSUB = """
import json, os, sys
words, names = sys.argv[1:], sys.argv[sys.argv.index("-v") + 1].split(",")
with open(os.environ["SITE"] + "/next", "w") as f:
    json.dump({"words": words, "variables": {name: os.environ[name] for name in names}}, f)
print("999.site")
"""
REFUSING_QSUB = """#!/bin/bash
echo >> "$SITE/tried"
[ "$(wc -l < "$SITE/tried")" -gt ALLOWED ] && exec PYTHON "$SITE/bin/real_qsub" "$@"
echo "qsub: Bad UID for job execution" >&2
exit 1
"""
ATTRIBUTES = """Job Id: 101.site
    Account_Name = AnyProject
    Mail_Users = me@any.site
    Resource_List.ncpus = 416
    Resource_List.select = 2:sys\n\ttem=any
    Resource_List.walltime = 02:00:00
"""


class Site:
    """A stand-in for a site with PBS and Slurm: start() runs a copy of a script from a spool
    folder, as PBS does; run() any script to its end, without ranks."""

    def __init__(self, folder, project, hosts):
        self.folder = folder
        self.project = project
        self.hosts = hosts
        for name in ("bin", "home", "spool"):
            (folder / name).mkdir(parents=True)
        self.profile("")
        self.nodes(1)
        self.write("attributes", ATTRIBUTES)
        self.program("qsub", f"#!{sys.executable}{QSUB}")
        self.program("qstat", '#!/bin/bash\n[ "$1" = -f ] && cat "$SITE/attributes"\n')
        self.program("module", '#!/bin/bash\necho "module $*"\n')    # under PBS it is a function
        self.program("sleep", "#!/bin/bash\nexec /bin/sleep 0.05\n")

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def read(self, name):
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def program(self, name, text):
        self.write(f"bin/{name}", text)
        (self.folder / "bin" / name).chmod(0o755)

    def nodes(self, mpiprocs):
        """As PBS writes them: each host so often, once without mpiprocs in `select`."""
        self.write("nodes", "".join(f"{host}\n" * mpiprocs for host in self.hosts))

    def profile(self, more):
        self.write("home/.bash_profile", SITE + more)

    def fake_launcher(self, *outcomes):
        self.write("outcomes", "\n".join(outcomes) + "\n")
        self.write("launched", "")
        for name in ("mpiexec", "mpirun", "srun"):
            self.program(name, FAKE_LAUNCHER)

    def refuse_qsub(self, times):
        """Let the first `times` calls of qsub fail."""
        text = REFUSING_QSUB.replace("ALLOWED", str(times)).replace("PYTHON", sys.executable)
        self.program("qsub", text)
        self.program("real_qsub", QSUB)

    def ranks_elsewhere(self):
        """Let pbs.sh start such; environment() is then a rank's. Returns the settings for it."""
        self.fake_launcher()
        self.program("mpirun", ELSEWHERE)
        self.program("rank", RANK)
        self.nodes(2)
        return {"CPU_BIND": None, "NPROC": "", "PYTHON": self.folder / "bin" / "rank"}

    def start(self, script, job, *words, on=None, **given):
        """given: what stands behind qsub -v, with the settings of these tests. on: the host."""
        env = clean_environment(env={
            "SITE": self.folder, "PYTHON_FOLDER": Path(sys.executable).parent,
            "HOME": self.folder / "home", "PBS_JOBID": job, "PBS_JOBNAME": "sedd",
            "PBS_QUEUE": "capacity", "PBS_O_QUEUE": "capacity", "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_NODEFILE": self.folder / "nodes", "PBS_O_WORKDIR": self.project,
            "TMPDIR": "/var/tmp/pbs." + job, "OMP_NUM_THREADS": 208, "THREADS": 1,
            "VENV": "none", **SETTINGS, **given})
        copy = shutil.copy(self.project / "jobs" / script, self.folder / "spool" / f"{job}.SC")
        line = ["bash", "-l", str(copy), *words]
        return Running(host_words(on, line) if on else line, self.folder / "home", env)

    def run(self, script, *words, job="101.site", **given):
        """To its end, without pre-flight. Returns the exit code; self.printed: all, with logs."""
        given = {"PREFLIGHT": "", **given}
        if script in SLURM_SCRIPTS:
            result = self.run_slurm(script, *words, **given)
        else:
            with self.start(script, job, *words, **given) as running:
                result = running.wait(600)
        self.printed = result.text + logs(self.project)
        return result.returncode

    def run_slurm(self, script, *words, END="NONE", **given):
        self.program("squeue", f"#!/bin/bash\necho {END}\n")
        self.program("scontrol", '#!/bin/bash\n[ "$1" = show ] && cat "$SITE/hostnames" || '
                                 'echo "$*" >> "$SITE/requeued"\n')
        self.write("hostnames", "".join(f"{host}\n" for host in self.hosts))
        copy = shutil.copy(self.project / "jobs" / script, self.folder / "spool" / "script")
        return bash(self.folder, copy, *words, **{
            "SITE": self.folder, "SLURM_SUBMIT_DIR": self.project, "SLURM_JOB_ID": "101",
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "any", "VENV": "none", **SETTINGS, **given})

    def goes_on(self):
        """Was a next job submitted, or this one requeued? Forgets it."""
        answer = self.read("next") != "" or self.read("requeued") == "requeue 101\n"
        (self.folder / "next").unlink(missing_ok=True)
        (self.folder / "requeued").unlink(missing_ok=True)
        return answer

    def environment(self):
        """The variables that the launcher was last started with, or a rank elsewhere."""
        lines = self.read("environment").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def launched(self):
        return self.read("launched").splitlines()

    def ranks(self):
        """The numbers of ranks of all starts."""
        return [int(line.split()[0]) for line in self.launched()]

    def asked(self):
        """The words of the next job's qsub, and the variables that it gets."""
        asked = json.loads(self.read("next"))
        return asked["words"], asked["variables"]


def logs(folder):
    return "\n".join(f"--- {path.name}\n{path.read_text()}"
                     for path in sorted([*folder.glob("logs/*"), *folder.glob("slurm-*.out")]))


def bash(folder, *words, **env):
    """Run `bash WORDS` in `folder` to its end: a Result."""
    with Running(["bash", *map(str, words)], folder, clean_environment(env=env)) as running:
        return running.wait(60)
