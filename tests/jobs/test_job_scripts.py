"""Do the job scripts refuse, start, show, go on and end their chains as they say?

No rank is started: see tests/job_site.py. test_job_chains.py trains with real launchers.
"""
import json
import re
import shlex
import shutil
import sys
import time

import pytest

from job_site import ATTRIBUTES, KEYS, PBS_SCRIPTS, SETTINGS, SLURM_SCRIPTS, bash
from launchers import ROOT

JOBS = ROOT / "jobs"
ONE_OF_EACH = pytest.mark.parametrize("script", ["aurora.pbs", "slurm.sh"])    # others are equal
CHECK = {"PREFLIGHT": "jobs/preflight.py"}


def clock(seconds):
    """A Unix time as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


# ---------------------------------------------------------------- what stands in them
@pytest.mark.parametrize("script", [*PBS_SCRIPTS, *SLURM_SCRIPTS])
def test_the_account_of_a_job_script_is_a_line_to_edit(script):
    accounts = re.findall(r"^#(?:PBS|SBATCH) +(?:-A *|--account=)(.*)", (JOBS / script).read_text(),
                          re.M)
    assert accounts == ["YOUR_PROJECT"]


@pytest.mark.parametrize("scripts, first", [
    (PBS_SCRIPTS, "# The next job."), (SLURM_SCRIPTS, "# The next start.")])
def test_job_scripts_of_one_batch_system_decide_alike_on_the_next_job(scripts, first):
    ends = {(JOBS / script).read_text().partition(first)[2] for script in scripts}
    assert len(ends) == 1 and "" not in ends


@pytest.mark.parametrize("name, ranks, reserved", [
    # Cores 0 and 52 are the system's; 42 to 47 and 94 to 99 oneCCL's, 48 to 51 Copper's.
    ("aurora.pbs", 12, {0, 52, *range(42, 52), *range(94, 100)}), ("polaris.pbs", 4, set())])
def test_every_rank_has_cores_of_its_own(name, ranks, reserved):
    spans = re.search(r"CPU_BIND:-list:([\d:-]+)\}", (JOBS / name).read_text())[1].split(":")
    pairs = [map(int, span.split("-")) for span in spans]
    mine = [core for first, last in pairs for core in range(first, last + 1)]
    assert len(spans) == ranks and len(set(mine)) == len(mine) and not set(mine) & reserved


# ---------------------------------------------------------------- what a job does after its run
@ONE_OF_EACH
@pytest.mark.parametrize("outcomes, given, wanted, said", [
    # A row: status.json's code and the launcher's -> the job's code, does it go on, its starts.
    (["75 143"], {}, (75, True, [4]), "yes"), (["0 143"], {}, (0, False, [4]), "it ended with 0"),
    (["70 1"], {}, (70, True, [4]), "yes"), (["2 143"], {}, (2, False, [4]), "it ended with 2"),
    (["130 1"], {}, (130, False, [4]), ""), (["null 137"], {}, (137, True, [4]), "yes"),
    (["null 0"], {}, (1, True, [4]), "yes"),
    # A finished run is not started again, if a rank dies while it leaves.
    (["0 1 leaving:hostB"], {}, (0, False, [4]), "it ended with 0"),
    # An exception ends the chain, and blames no host.
    (["1 143 raises:hostB"], {}, (1, False, [4]), "it ended with 1"),
    # A rank that died, or is late, on one host: on the other one in the same job.
    (["1 143 dies:hostB", "0 0"], {}, (0, False, [4, 2]), "on hostA, without hostB"),
    (["null 143 dies:hostB.a.domain", "75 0"], {}, (75, True, [4, 2]), "on hostA, without hostB"),
    (["- 1 early:hostA", "0 0"], {}, (0, False, [4, 2]), "on hostB, without hostA"),
    (["70 1 hangs:hostB", "0 0"], {}, (0, False, [4, 2]), "on hostA, without hostB"),
    (["70 1 hangs:hostA,hostB"], {}, (70, True, [4]), "yes"),
    (["70 1 loads:hostA"], {}, (70, True, [4]), "yes"),
    (["1 1 dies:hostC"], {}, (1, True, [4]), "yes"),
    (["1 1 dies:hostB", "1 1 dies:hostA"], {}, (1, True, [4, 2]), "no other host is left"),
    (["1 1 dies:hostB", "75 75 old"], {}, (75, True, [4, 2]), "yes"),
    (["1 1 dies:hostB"], {"SAVE_SECONDS": "7000"}, (1, True, [4]), "time of the job is ne"),
    (["1 1 dies:hostB"], {"STARTS": "1"}, (1, False, [4]), "no start is left"),
    (["1 1 dies:hostB", "75 75"], {"STARTS": "2"}, (75, False, [4, 2]), "no start is left"),
    # The code of an earlier start, which is still there, does not count.
    (["- 2"], {}, (2, False, [4]), ""), (["- 0"], {}, (0, False, [4]), ""),
    (["- 143"], {}, (143, False, [4]), ""),
    (["75 75 old"], {}, (75, False, [4]), "there is no new checkpoint"),
    (["75 75 cancel"], {}, (75, False, [4]), "the job was cancelled"),
    (["75 75 stop"], {}, (75, False, [4]), "there is a file runs/mine/STOP"),
    (["1 1 cancel"], {}, (1, False, [4]), ""), (["75 75"], {"STARTS": "1"}, (75, False, [4]), ""),
    # The pre-flight, which runs first.
    (["- 0 old", "75 75"], CHECK, (75, True, [4, 4]), "yes"),
    (["- 3 suspect", "- 0 old", "0 0"], CHECK, (0, False, [4, 2, 2]), "on hostB, without hostA"),
    (["- 0 old", "1 1 dies:hostB", "- 3 old"], CHECK, (1, True, [4, 4, 2]), "yes"),
    (["- 143 old"], CHECK, (3, False, [4]), "nothing was checked"),
    (["- 2 old"], CHECK, (2, False, [4]), ""), (["- 0 cancel"], CHECK, (143, False, [4]), "")])
def test_what_a_job_does_after_each_end_of_a_run(script, outcomes, given, wanted, said, site):
    run_dir = site.project / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "status.json").write_text('{"code": 75, "suspects": ""}')      # of an earlier start
    site.fake_launcher(*outcomes)
    if script == "slurm.sh":
        given = given | {"END": clock(time.time() + 7200)}
    found = site.run(script, **given), site.goes_on(), site.ranks()
    assert found == wanted, site.printed
    assert said in site.printed


@pytest.mark.parametrize("script", [*PBS_SCRIPTS, *SLURM_SCRIPTS])
def test_a_script_trains_and_goes_on_without_its_optional_part(script, site, project):
    shutil.rmtree(project / "jobs" / "lib")
    if script == "pbs.sh":
        site.nodes(2)
    site.fake_launcher("75 143")
    assert site.run(script, **CHECK) == 75 and site.goes_on(), site.printed
    launched, = site.launched()
    assert "driver.py --config config.yaml --work_dir runs/mine" in launched


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_starts_of_a_slurm_job_are_counted_over_its_requeues(script, site):
    for restarts, goes_on in ((1, True), (2, False)):
        site.fake_launcher("75 75")
        assert site.run(script, SLURM_RESTART_COUNT=restarts, STARTS=3) == 75
        assert site.goes_on() == goes_on, site.printed


def test_the_next_job_is_this_script_with_options_and_variables_of_this_job(site, project):
    site.fake_launcher("75 75")
    (project / "jobs" / "aurora.pbs").rename(project / "jobs" / "mine.pbs")
    given = {"ARGS": "training.stop_signals=[SIGTERM,SIGUSR1] data.max_length=32", "NPROC": "3",
             "CPU_BIND": "none", "STARTS": "7"}
    assert site.run("mine.pbs", **given) == 75, site.printed
    words, variables = site.asked()
    assert words[-1] == str(site.folder / "spool" / "101.site.SC"), "as it was submitted"
    assert set(zip(words[:-1:2], words[1:-1:2])) == {
        ("-W", "depend=afterany:101.site"), ("-A", "AnyProject"), ("-q", "capacity"),
        ("-l", "select=2:system=any"), ("-l", "walltime=02:00:00"), ("-v", ",".join(variables))}
    wanted = {"THREADS": "1", "VENV": "none", "PREFLIGHT": "", **SETTINGS, **given, "STARTS": "6"}
    assert variables == wanted | {"PREFLIGHT": ""}, "what is not given may be edited"
    launched, = site.launched()
    assert launched.startswith("6 -n 6 ")
    assert launched.endswith(f"--config config.yaml --work_dir runs/mine {given['ARGS']}")


@pytest.mark.parametrize("refusals, goes_on", [(1, True), (2, False)])
def test_a_qsub_that_fails_is_given_again_or_shown(refusals, goes_on, site):
    site.fake_launcher("75 75")
    site.refuse_qsub(refusals)
    assert site.run("aurora.pbs") == 75 and site.goes_on() == goes_on, site.printed
    assert len(site.read("tried").splitlines()) == 2
    assert ("not submitted: qsub -W " in site.printed) != goes_on


@pytest.mark.parametrize("given", [{"PBS_ENVIRONMENT": "PBS_INTERACTIVE"}, {"PBS_ARRAY_INDEX": 2}])
def test_no_job_follows_an_interactive_one_or_a_member_of_an_array(given, site):
    site.fake_launcher("75 75")
    assert site.run("aurora.pbs", **given) == 75 and not site.goes_on(), site.printed


def test_of_an_array_of_slurm_the_task_is_requeued(site):
    site.fake_launcher("75 75")
    assert site.run("slurm.sh", SLURM_ARRAY_JOB_ID=101, SLURM_ARRAY_TASK_ID=3) == 75
    assert site.read("requeued") == "requeue 101_3\n"


def test_no_users_file_hides_how_a_job_ends(site):
    site.fake_launcher("75 143")
    site.write("home/.bash_logout", "false\n$no_such_variable\n")
    assert site.run("aurora.pbs") == 75, site.printed
    assert site.run("aurora.pbs", CONFIG="no.yaml") == 2, site.printed


# ---------------------------------------------------------------- what a job refuses and shows
@ONE_OF_EACH
@pytest.mark.parametrize("given, word", [
    ({"ARGS": "--config=a"}, "--config"), ({"ARGS": "x=1\t--fresh"}, "--fresh"),
    ({"ARGS": "--resume a.pt"}, "--resume"), ({"ARGS": '--data "a b"'}, '--data "a b"'),
    ({"ARGS": "a\\b"}, "a\\b"), ({"CONFIG": "no.yaml"}, "no.yaml"), ({"SCRIPT": "no.py"}, "no.py"),
    ({"SAVE_SECONDS": "10m"}, "SAVE_SECONDS=10m"), ({"STARTS": "many"}, "STARTS=many"),
    ({"STARTS": "08"}, "STARTS=08"), ({"NPROC": "0"}, "NPROC=0"), ({"RUN_DIR": 'a"b'}, 'a"b'),
    ({"SAVE_SECONDS": "7200", "END": "2000-01-01T00:00:00"}, "SAVE_SECONDS=7200"),
    ({"VENV": ".venv"}, "bash jobs/local.sh"), ({"VENV": "mine"}, "venv --system-site-packages mi"),
    ({"PYTHON": "no-python"}, "no-python"), ({"PYTHON": "no_torch"}, "no_torch")])
def test_a_job_refuses_before_it_starts_anything(script, given, word, site):
    site.fake_launcher("75 75")
    site.program("no_torch", f'#!/bin/bash\nexec {sys.executable} -S -I "$@"\n')
    assert site.run(script, **given) == 2 and word in site.printed, site.printed
    assert site.launched() == [] and not site.goes_on()


@pytest.mark.parametrize("script, given", [("aurora.pbs", {"NPROC": "6"}),
                                           ("polaris.pbs", {"CPU_BIND": "list:0:1"})])
def test_a_list_of_cores_for_another_number_of_ranks_is_refused(script, given, project):
    result = bash(project, f"jobs/{script}", DRY_RUN=1, **given)
    assert result.returncode == 2 and "CPU_BIND=list:" in result.stderr, result.text
    assert bash(project, f"jobs/{script}", DRY_RUN=1, **{**given, "CPU_BIND": "none"}
                ).returncode == 0


def test_arguments_of_sbatch_go_to_the_training_script(site):
    site.fake_launcher("0 0")
    assert site.run("slurm.sh", "--data", "a b", ARGS="x=[1,2]") == 0, site.printed
    launched, = site.launched()
    assert launched.startswith("4 --export=ALL --nodes=2 --nodelist=hostA,hostB --ntasks=4 ")
    assert launched.endswith("--work_dir runs/mine x=[1,2] --data a b")
    site.fake_launcher("0 0")
    assert site.run("slurm.sh", "--config", "other.yaml") == 2 and site.launched() == []


@ONE_OF_EACH
def test_a_job_that_was_not_submitted_ends_before_it_loads_modules(script, site, project):
    result = bash(project, "-l", f"jobs/{script}", SITE=site.folder, HOME=site.folder / "home",
                  PYTHON_FOLDER="")
    assert result.returncode == 2 and "submit this with " in result.stderr
    assert site.read("modules") == "" and not (project / "logs").exists()


@pytest.mark.parametrize("script, line", [
    ("aurora.pbs", "mpiexec -n 24 --ppn 12 --hostfile "),
    ("polaris.pbs", "mpiexec -n 8 --ppn 4 --hostfile "), ("pbs.sh", "mpirun -n 8 --hostfile "),
    ("slurm.sh", "srun --export=ALL --nodes=2 --nodelist=host1\\,host2 --ntasks=8 "),
    ("perlmutter.sh", "srun --export=ALL --nodes=2 --nodelist=host1\\,host2 --ntasks=8 ")])
def test_a_dry_run_shows_what_would_start_where_and_from_what(script, line, site, project):
    (project / "here.fasta").touch()
    (project / "mine" / "bin").mkdir(parents=True)
    (project / "mine" / "bin" / "python").symlink_to(sys.executable)
    before = sorted(project.rglob("*"))
    words = ["--data", "here.fasta", "--val_data=away.fasta"]
    result = bash(project, f"jobs/{script}", *words, DRY_RUN=2, HOME=site.folder / "home",
                  ARGS="x=[1,2]\n  y=1", VENV="mine", DDP_TOKEN="SECRET4", **KEYS)
    check, training = [text for text in result.stdout.splitlines() if text.startswith(line)]
    assert result.returncode == 0 and " jobs/preflight.py " in check, result.text
    assert shlex.split(training)[-5:] == ["x=[1,2]", "y=1", *words], "both lines of ARGS"
    for said in (f"Python: {project}/mine/bin/python", "configs/sedd_uniref50.yaml is there",
                 "here.fasta is there", "ATTENTION: away.fasta is not there"):
        assert said in result.stdout
    assert "SECRET" not in result.text and sorted(project.rglob("*")) == before
    result = bash(project, f"jobs/{script}", DRY_RUN=1, PYTHON="shifter --image=any/one:1 python")
    assert result.returncode == 0 and "no .venv" in result.stdout, "it names what is to be made"
    assert " shifter --image=any/one:1 python -u train_sedd_ddp.py " in result.stdout


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_a_dry_run_under_slurm_shows_the_ranks_that_its_own_lines_ask_for(script, project):
    text = (project / "jobs" / script).read_text()
    text = re.sub("(#SBATCH --ntasks-per-node)=.*", r"\1=7", text)
    (project / "jobs" / script).write_text(re.sub("(#SBATCH --cpus-per-task)=.*", r"\1=5", text))
    result = bash(project, f"jobs/{script}", DRY_RUN=2)
    assert "--ntasks=14 --ntasks-per-node=7 --cpus-per-task=5 " in result.stdout
    result = bash(project, f"jobs/{script}", DRY_RUN="yes")
    assert result.returncode == 2 and "DRY_RUN=yes" in result.stderr and "srun" not in result.stdout


@ONE_OF_EACH
def test_the_log_has_modules_and_revision_and_no_core_file_is_written(script, site, project):
    site.fake_launcher("0 0")
    site.program("git", '#!/bin/bash\necho "v1-$1"\n')
    assert site.run(script) == 0 and site.read("core") == "0\n"
    log, = (project / "logs").glob("config-101.log")
    assert "module list" in log.read_text() and "v1-describe" in log.read_text()
    assert "python -u driver.py --config config.yaml" in log.read_text()


# ---------------------------------------------------------------- the time of a job
def deadline(site):
    return int(site.read("deadline"))


@pytest.mark.parametrize("given, answers_at, seconds, said", [
    ({}, 1, 7200, ""), ({}, 2, 7200, ""), ({}, 9, 43200, "ATTENTION"),
    ({"WALLTIME": "01:09:08"}, 9, 4148, "")])
def test_a_job_knows_its_walltime_which_counts_from_before_modules(given, answers_at, seconds,
                                                                   said, site):
    site.fake_launcher("75 75")
    site.profile("module() { /bin/sleep 1; }\n")     # called twice
    site.program("qstat", f"""#!/bin/bash
echo >> "$SITE/asked"
[ "$(wc -l < "$SITE/asked")" -ge {answers_at} ] && cat "$SITE/attributes"
""")
    before = time.time()
    assert site.run("aurora.pbs", SAVE_SECONDS="100", **given) == 75, site.printed
    assert before - 1 <= deadline(site) - seconds + 100 <= time.time() - 2
    assert said in site.printed
    words = [word for word in site.asked()[0] if word.startswith("walltime=")]
    assert words == [f"walltime={time.strftime('%H:%M:%S', time.gmtime(seconds))}"]


def test_the_time_of_an_interactive_job_counts_from_its_own_start(site):
    site.fake_launcher("75 75")
    began = int(time.time()) - 1000
    site.write("attributes", ATTRIBUTES + f"    stime = {time.ctime(began)}\n")
    assert site.run("aurora.pbs", SAVE_SECONDS="100") == 75, site.printed
    assert deadline(site) == began + 7200 - 100


@pytest.mark.parametrize("walltime", ["3600", "30:00", "1:00:00,mem=1gb"])
def test_a_walltime_that_is_no_time_is_refused(walltime, site):
    site.fake_launcher("75 75")
    assert site.run("aurora.pbs", WALLTIME=walltime) == 2 and walltime in site.printed
    assert site.launched() == [] and not site.goes_on()


@pytest.mark.parametrize("script", PBS_SCRIPTS)
def test_a_profile_that_protects_files_does_not_keep_the_hosts_from_being_written(script, site):
    site.profile("set -o noclobber\n")
    site.nodes(2)
    site.fake_launcher("0 0")
    assert site.run(script) == 0, site.printed
    assert sorted(set(site.read("hosts").split())) == ["hostA", "hostB"]


@ONE_OF_EACH
def test_a_job_that_cannot_write_its_log_starts_nothing(script, site, project):
    (project / "logs").touch()
    site.fake_launcher("75 75")
    assert site.run(script) == 2 and site.launched() == [] and not site.goes_on()


def test_under_slurm_the_run_stops_so_long_before_the_end_of_the_job(site):
    site.fake_launcher("75 75")
    end = int(time.time()) + 3600
    assert site.run("slurm.sh", END=clock(end), SAVE_SECONDS="200") == 75, site.printed
    assert deadline(site) == end - 200


@ONE_OF_EACH
def test_sigterm_at_the_end_of_the_time_does_not_end_the_chain_as_a_cancelled_job_does(script,
                                                                                       site):
    site.write("attributes", ATTRIBUTES.replace("02:00:00", "00:00:03"))
    given = {"END": clock(time.time() + 5)} if script == "slurm.sh" else {}
    site.fake_launcher("75 75 late")
    assert site.run(script, SAVE_SECONDS="1", **given) == 75 and site.goes_on(), site.printed


# ---------------------------------------------------------------- ranks, hosts, variables
@pytest.mark.parametrize("accum, args, words", [
    ("", "", ["training.micro_batches=4"]), ("accum: 3", "", ["training.micro_batches=12"]),
    ("accum: 3", "training.accum=2", ["training.micro_batches=8"]),
    ("micro_batches: 6", "", []), ("", "training.micro_batches=5", ["training.micro_batches=5"])])
def test_a_start_on_fewer_hosts_has_the_global_batch_of_all(accum, args, words, site, project):
    (project / "config.yaml").write_text(f"training:\n  {accum}\n  seed: 0\n")
    site.fake_launcher("- 1 early:hostB", "0 0")
    (project / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    launcher = site.read("bin/mpiexec").replace('!= old ]', '= new ]')     # saves nothing
    site.program("mpiexec", launcher)
    assert site.run("aurora.pbs", ARGS=args) == 0, site.printed
    assert site.ranks() == [4, 2]
    found = [word for word in site.launched()[1].split() if "micro_batches" in word]
    assert found == words


def test_a_start_on_fewer_hosts_after_a_checkpoint_takes_the_batch_from_there(site):
    site.fake_launcher("1 1 dies:hostB", "0 0")
    assert site.run("aurora.pbs") == 0 and site.ranks() == [4, 2], site.printed
    assert "micro_batches" not in site.read("launched")


@pytest.mark.parametrize("script, hosts", [("aurora.pbs", "hostB\nhostC\n"),
                                           ("pbs.sh", "hostB\nhostB\nhostC\nhostC\n")])
def test_the_ranks_that_are_left_meet_on_a_host_that_is_left(script, hosts, site):
    site.hosts = ["hostA", "hostB", "hostC"]
    site.nodes(2)
    site.fake_launcher("1 1 dies:hostA", "0 0")
    assert site.run(script, DDP_MPI4PY=0) == 0, site.printed
    assert site.read("meetings").split() == ["hostA", "hostB"] and site.ranks() == [6, 4]
    assert site.read("hosts") == hosts


def test_a_job_of_any_pbs_site_has_the_ranks_that_select_asks_for(site):
    site.nodes(2)
    site.fake_launcher("0 0")
    assert site.run("pbs.sh", NPROC="") == 0 and site.ranks() == [4], site.printed
    assert site.environment()["I_MPI_PERHOST"] == "2", "else Intel MPI deals them in turn"


@pytest.mark.parametrize("select, mpiprocs, said", [
    ("2:ngpus=4", 1, True), ("2:ncpus=8:ngpus=4:mpiprocs=2", 2, True),
    ("2:ngpus=4:mpiprocs=40", 40, True), ("2:mpiprocs=4:ngpus=4", 4, False),
    ("1:ngpus=2:mpiprocs=2+1:ngpus=2:mpiprocs=2", 2, False), ("2:ncpus=8", 1, False)])
def test_a_job_says_where_ranks_and_gpus_of_a_node_differ(select, mpiprocs, said, site):
    site.nodes(mpiprocs)
    site.write("attributes", ATTRIBUTES.replace("2:sys\n\ttem=any", select))
    site.fake_launcher("0 0")
    assert site.run("pbs.sh", NPROC="", CPU_BIND=None) == 0, site.printed
    assert ("ATTENTION" in site.printed and select in site.printed) == said, site.printed


@pytest.mark.parametrize("qstat_answers", [True, False])
def test_ranks_on_other_hosts_get_the_variables_of_the_job(qstat_answers, site, project):
    given = {"MY_OWN": "a=b, c\nd", "GLOO_SOCKET_IFNAME": "hsn0", "WANDB_MODE": "online"}
    more = site.ranks_elsewhere()
    if not qstat_answers:
        site.program("qstat", "#!/bin/bash\nexit 1\n")
    assert site.run("pbs.sh", WALLTIME="1:00:00", **more, **given) == 0, site.printed
    found = site.environment()
    wanted = {"DDP_WORLD_SIZE": "4", "MASTER_ADDR": "hostA", "OMP_NUM_THREADS": "1",
              "TMPDIR": "/tmp", "GLOO_SOCKET_IFNAME": "hsn0", "WANDB_MODE": "online",
              "MY_OWN": "a=b, c"}
    assert wanted.items() <= found.items() and int(found["DDP_DEADLINE"]) > time.time()
    assert not {"PBS_JOBID", "PBS_NODEFILE"} & set(found)
    assert site.read("mode") == "600\n", "nobody else reads it"
    assert list((project / "logs").glob("environment*")) == [], "nor is it left behind"


@pytest.mark.parametrize("script", [*PBS_SCRIPTS, *SLURM_SCRIPTS])
def test_ranks_get_keys_that_no_command_line_or_output_shows(script, site):
    """The launchers of the others pass all of their own variables."""
    site.fake_launcher("75 75")
    more = site.ranks_elsewhere() if script == "pbs.sh" else {}
    site.run(script, **more, **KEYS)
    assert KEYS.items() <= site.environment().items(), site.printed
    asked = {"words": [], "variables": {}}
    if site.read("next"):
        asked = json.loads(site.read("next"))
        assert asked["variables"]["WANDB_API_KEY"] == "SECRET1", "the next job has it too"
    assert "SECRET" not in "\n".join([*site.launched(), *asked["words"], site.printed])


def test_the_plugin_of_polaris_for_nccl_has_its_libraries(site, tmp_path):
    site.fake_launcher("0 0")
    assert site.run("polaris.pbs", NCCL_PLUGIN_DIR=tmp_path, LD_LIBRARY_PATH="/any") == 0
    found = site.environment()
    assert found["LD_LIBRARY_PATH"] == f"/soft/libraries/hwloc/lib:{tmp_path}:/any"
    assert found["NCCL_NET"] == "AWS Libfabric" and "plain sockets" not in site.printed
    site.fake_launcher("0 0")
    assert site.run("polaris.pbs", NCCL_PLUGIN_DIR="/no/such") == 0, site.printed
    assert "/no/such" in site.printed and "NCCL_NET" not in site.environment()
