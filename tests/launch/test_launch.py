"""Launchers write job scripts, manifests and commands that their systems accept, and refuse
mistakes at submission.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import ROOT

from launch import gke, slurm
from launch.arguments import after_dashes, check_sweep, check_train
from lm import parameters
from lm.command_line import training
from lm.command_line.loading import load
from lm.parallel.mesh import check_mesh
from lm.system import git
from lm.workdir.directory import Workdir

CONFIG = (
    "--",
    "--config",
    "configs/gpt2_124m.py",
    "--config.mesh.fsdp=8",
    "--config.train.batch_size=384",
)
NO_MESH = (*CONFIG[:3], "--config.train.batch_size=384")
SWEEP = ("--", "--config", "configs/sweeps/positions.py", "--budget", "full")
JOB = ("--name", "gpt2", "--image", "an/image", "--claim", "runs")
GPUS = (*JOB, "--gpu", "h100:16")
TPUS = (*JOB, "--tpu", "v5e:4x8")


@pytest.fixture
def launch(capsys, monkeypatch):
    """Return launch(name, *arguments), which runs python -m launch.NAME in this process."""
    monkeypatch.chdir(ROOT)

    def launch(name: str, *arguments: str) -> subprocess.CompletedProcess:
        code = {"slurm": slurm, "gke": gke}[name].main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return launch


def sbatch_options(script: str) -> dict[str, str]:
    """Return the options in the #SBATCH lines of a job script."""
    found = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.M)
    return dict(found)


def test_slurm_script_has_one_task_per_gpu(launch, tmp_path):
    workdir = tmp_path / "a run"
    where = ("--nodes", "4", "--gpus-per-node", "8", "--workdir", str(workdir))
    done = launch("slurm", *where, "--dry-run", *CONFIG)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0
    expected = {"nodes": "4", "ntasks-per-node": "8", "gpus-per-node": "8"}
    expected |= {"requeue": "", "output": f"'{workdir}/slurm.log'"}
    assert expected.items() <= sbatch_options(done.stdout).items()
    assert (
        f"lm.train {' '.join(CONFIG[1:])} --workdir '{workdir}' --platform gpu --resume"
        in done.stdout
    )
    assert not workdir.exists()
    done = launch("slurm", "--nodes", "2", "--dry-run", *CONFIG)
    assert f"--workdir {ROOT / 'runs' / 'gpt2_124m'} --platform cpu --resume" in done.stdout


@pytest.mark.parametrize("module", [gke, slurm])
def test_the_commands_in_the_help_of_a_launcher_are_accepted(module, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as caught:
        module.parse_arguments(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [
        shlex.split(line)[3:]
        for line in lines
        if line.startswith(f"  python -m {module.__name__} ")
    ]
    assert len(examples) >= 2
    for arguments in examples:
        train = after_dashes(module.parse_arguments(arguments).train)
        if "--array" in arguments:
            check_sweep(train, workdir="")
        else:
            check_train(train, workdir="", n_devices=None)


def test_slurm_submits_a_sweep_as_an_array_of_jobs_with_one_task(launch, tmp_path):
    options = ("--array", "3", "--gpus-per-node", "4", "--workdir", str(tmp_path / "sweep"))
    done = launch("slurm", *options, "--dry-run", *SWEEP)
    expected = {"array": "0-2", "nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "4"}
    expected |= {"output": f"{tmp_path}/sweep-%a.log"}
    assert expected.items() <= sbatch_options(done.stdout).items()
    assert (
        f"lm.sweep --config configs/sweeps/positions.py --budget full --workdir {tmp_path}/sweep "
        in done.stdout
    )


def test_documented_runs_fit_their_machines():
    for path in ("docs/scaling.md", "launch/README.md", "launch/gke.py", "launch/slurm.py"):
        text = re.sub(r"\\+\n\s*", "", (ROOT / path).read_text())
        found = re.findall(r"-- --config (configs/\w+\.py)((?: --config\.\S+)*)", text)
        assert found
        for config, overrides in found:
            loaded = load(
                str(ROOT / config), [word.removeprefix("--config.") for word in overrides.split()]
            )
            for n_devices in (8, 16, 32):
                check_mesh(parameters.resolve(loaded, loaded.model.vocab_size), n_devices)


def as_jobset(manifest: dict) -> dict:
    """Return what the published schemas keep of a manifest; importing them takes a second."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    return JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


@pytest.mark.parametrize(
    ("machines", "slices", "pods", "devices"),
    [
        (GPUS, 1, 2, 8),
        ((*TPUS, "--slices", "2"), 2, 8, 4),
        ((*JOB, "--tpu", "v5p:4x4x12"), 1, 48, 4),
    ],
)
def test_jobset_follows_the_published_schema(launch, machines, slices, pods, devices):
    """Kubeflow publishes models generated from the schemas of JobSet and Kubernetes; they drop
    unknown keys.
    """
    # which exists only in the pods
    done = launch("gke", *machines, *CONFIG, "--config.init_from=/runs/pretrained")
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert as_jobset(manifest) == manifest
    (jobs,) = manifest["spec"]["replicatedJobs"]
    assert jobs["replicas"] == slices
    job = jobs["template"]["spec"]
    assert job["parallelism"] == job["completions"] == pods
    (container,) = job["template"]["spec"]["containers"]
    assert list(container["resources"]["limits"].values()) == [devices]
    assert container["command"][:3] == ["python", "-m", "lm.train"]
    assert ("--platform", "tpu" if "--tpu" in machines else "gpu") in pairwise(container["command"])
    assert container["command"][-len(CONFIG) :] == [
        *CONFIG[1:],
        "--config.init_from=/runs/pretrained",
    ]


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_what_pods_of_gpus_and_tpus_have_of_their_own(launch):
    gpus, tpus = (
        yaml.safe_load(launch("gke", *machines, *CONFIG).stdout) for machines in (GPUS, TPUS)
    )
    (container,) = pod_of(gpus)["containers"]
    assert container["env"] == [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"}]
    exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert "annotations" not in gpus["metadata"]
    assert exclusive in tpus["metadata"]["annotations"]
    pod_of(gpus)["paralelism"] = 2  # the schema detects a misspelled key
    assert as_jobset(gpus) != gpus


def test_requests_spot_nodes_a_queue_and_secrets(launch):
    done = launch("gke", *GPUS, *CONFIG)
    (container,) = pod_of(yaml.safe_load(done.stdout))["containers"]
    assert container["resources"]["requests"] == {"cpu": "16", "memory": "64Gi"}
    options = ("--spot", "--queue", "team-a", "--secret", "wandb", "--cpu", "64", "--memory", "1Ti")
    done = launch("gke", *GPUS, *options, *CONFIG)
    manifest = yaml.safe_load(done.stdout)
    assert as_jobset(manifest) == manifest
    pod = pod_of(manifest)
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {toleration["key"] for toleration in pod["tolerations"]} == {
        "cloud.google.com/gke-spot",
        "nvidia.com/gpu",
    }
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert container["resources"]["requests"] == {"cpu": "64", "memory": "1Ti"}


def test_a_file_is_merged_into_the_pods_such_as_the_network_of_h100_machines(launch):
    done = launch("gke", *GPUS, "--pod", "launch/tcpx.yaml", *CONFIG)
    manifest = yaml.safe_load(done.stdout)
    assert as_jobset(manifest) == manifest
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    interfaces = json.loads(template["metadata"]["annotations"]["networking.gke.io/interfaces"])
    assert [entry["interfaceName"] for entry in interfaces] == [
        "eth0",
        "eth1",
        "eth2",
        "eth3",
        "eth4",
    ]
    (container,) = template["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["LD_LIBRARY_PATH"] == gke.DRIVER  # the file adds to what is there
    assert env["NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"] == "eth1,eth2,eth3,eth4"
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    (sidecar,) = template["spec"]["initContainers"]
    assert {
        mount["name"] for mount in [*container["volumeMounts"], *sidecar["volumeMounts"]]
    } == volumes
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_a_manifest_is_printed_only_if_the_step_compiles_for_its_devices(launch, monkeypatch):
    """On the mesh of the run: where none is set, --plan alone would choose the best one, but a run
    has replicas.
    """
    ran = []
    for code in (0, 2):
        result = subprocess.CompletedProcess([], code)
        monkeypatch.setattr(
            subprocess, "run", lambda command, result=result, **_: ran.append(command) or result
        )
        gpus = (
            "--nodes",
            "2",
            "--gpus-per-node",
            "8",
            "--dry-run",
            "--workdir",
            "/none/x",
            "--check",
            "h100",
        )
        tpus = (*TPUS, "--slices", "2", "--check")
        for name, arguments, *devices in (
            ("gke", tpus, "v5e:64", "2"),
            ("slurm", gpus, "h100:16", "1"),
        ):
            checked = [
                "--workdir",
                ".",
                "--plan",
                "--compiled",
                "--device",
                devices[0],
                "--slices",
                devices[1],
            ]
            checked.append("--config.log.wandb=false")
            mirrored = (
                *CONFIG,
                "--mirror=file:///copy",
                *(["--config.log.wandb=true"] if name == "gke" else []),
            )
            mesh = [f"--config.mesh.replica={devices[0].partition(':')[2]}"]
            for config, more in ((CONFIG, []), (NO_MESH, mesh), (mirrored, [])):
                done = launch(name, *arguments, *config)
                assert (done.returncode, bool(done.stdout)) == (code, code == 0)
                kept = [argument for argument in config[1:] if "wandb" not in argument]
                assert ran[-1][3:] == [*kept, *checked, *more]
                # --mirror needs a workdir, and wandb need not be installed
                training.parse_arguments(ran[-1][3:])
    for name, arguments in (("gke", TPUS), ("slurm", gpus[:-2])):
        assert "fits into memory; --check" in launch(name, *arguments, *CONFIG).stderr


def test_the_image_runs_as_the_user_of_the_pods_and_has_the_commit(launch, monkeypatch):
    image = (ROOT / "launch" / "Dockerfile").read_text()
    pod = pod_of(yaml.safe_load(launch("gke", *GPUS, *CONFIG).stdout))
    assert f"\nUSER {pod['securityContext']['fsGroup']}\n" in image
    assert "ENV LM_COMMIT=$COMMIT" in image
    checks = "\n".join(line.removeprefix("RUN ") for line in image.splitlines() if "exit 1" in line)
    base, commit = f"python:3.13-slim@sha256:{'0' * 64}", "0a1b2c"
    for env, code in (((base, commit), 0), (("python:3.13-slim", commit), 1), ((base, ""), 1)):
        environment = dict(zip(("BASE", "COMMIT"), env, strict=True))
        assert (
            subprocess.run(["sh", "-ec", checks], env=environment, capture_output=True).returncode
            == code
        ), env
    monkeypatch.setattr(git, "__file__", "/git.py")  # not in a checkout
    assert git.git_state() is None
    monkeypatch.setenv("LM_COMMIT", "0a1b2c")
    assert git.git_state() == {"commit": "0a1b2c", "dirty": False}


MISTAKES = {
    "slurm": {
        "after two dashes: -- --config FILE": ("--workdir", "runs/x"),
        "--nodes must be at least 1": ("--nodes", "0", *CONFIG),
        "the last 2 are for saving": ("--time", "2", *CONFIG),
        "No closing quotation": ("--sbatch=--comment='x", *CONFIG),
        "--name 'a\\nsrun true': a line break": ("--name", "a\nsrun true", *CONFIG),
        "--workdir 'runs/a\\nb': a line break": ("--workdir", "runs/a\nb", *CONFIG),
        "mount the bucket as a directory": ("--workdir", "gs://bucket/run", *CONFIG),
        "--restarts must be at least 0": ("--restarts", "-1", *CONFIG),
        "--platform after the two dashes: the launcher sets this": (*CONFIG, "--platform=gpu"),
        "--platform after the two dashes: the launcher sets": (
            "--array",
            "3",
            *SWEEP,
            "--platform=gpu",
        ),
        "--check h100: it compiles a run on GPUs": ("--check", "h100", *CONFIG),
        "each job of a sweep has one node": ("--array", "3", "--nodes", "2", *SWEEP),
        "--workdir after the two dashes: set it before": (*CONFIG, "--workdir=elsewhere"),
        "--workdir after the two dashes: set it": ("--array", "3", *SWEEP, "--workdir=elsewhere"),
        "config.init_from: runs/none holds no checkpoints": (
            *CONFIG,
            "--config.init_from=runs/none",
        ),
        "--resume after the two dashes": (*CONFIG, "--resume"),
        "configs/none.py": ("--", "--config", "configs/none.py"),
        "did you mean d_model": (*CONFIG, "--config.model.d_modl=64"),
        "--stpes=3: unexpected argument": (*CONFIG, "--stpes=3"),
        "configs/sweeps/none.py": ("--array", "3", "--", "--config", "configs/sweeps/none.py"),
        "config.mesh: replica -1 x fsdp 8": ("--gpus-per-node", "6", *CONFIG),
    },
    "gke": {
        "config.mesh: replica -1 x fsdp 8": (*JOB, "--gpu", "h100:4", *CONFIG),
        "12 is not divisible by replica x fsdp = 32": (
            *TPUS,
            *CONFIG[:4],
            "--config.train.batch_size=12",
        ),
        "--restarts must be at least 0": (*GPUS, "--restarts", "-1", *CONFIG),
        "after two dashes: -- --config FILE": GPUS,
        "--name: 'GPT_2' is not a valid": ("--name", "GPT_2", *GPUS[2:], *CONFIG),
        "--secret: 'a b' is not a valid": (*GPUS, "--secret", "a b", *CONFIG),
        "--memory: '64 GB' is not a size such as 64Gi": (*GPUS, "--memory", "64 GB", *CONFIG),
        "--slices must be at least 1": (*TPUS, "--slices", "0", *CONFIG),
        "--slices 2: several slices need TPU": (*GPUS, "--slices", "2", *CONFIG),
        "1 is not a multiple of the 2 TPU slices": (
            *TPUS,
            "--slices",
            "2",
            *NO_MESH,
            "--config.mesh.fsdp=64",
        ),
        "--pod: launch/none.yaml cannot be read": (*GPUS, "--pod", "launch/none.yaml", *CONFIG),
        "--pod: launch/skypilot.yaml must have": (*GPUS, "--pod", "launch/skypilot.yaml", *CONFIG),
        "--cpu must be at least 1": (*GPUS, "--cpu", "0", *CONFIG),
        "--workdir after the two dashes: the workdir is /runs/NAME": (
            *GPUS,
            *CONFIG,
            "--workdir",
            "/elsewhere",
        ),
        "--coordinator_address after the two dashes": (*GPUS, *CONFIG, "--coordinator_address=x:1"),
        "--num-processes after the two dashes": (*GPUS, *CONFIG, "--num-processes", "3"),
        "12 is not a multiple of the 8 GPUs": (*JOB, "--gpu", "h100:12", *CONFIG),
        "'h900:8' is not KIND:COUNT": (*JOB, "--gpu", "h900:8", *CONFIG),
        "there is no v5e slice 0x4": (*JOB, "--tpu", "v5e:0x4", *CONFIG),
        "there are 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16": (*JOB, "--tpu", "v5e:4x3", *CONFIG),
        "at most 6144 chips": (*JOB, "--tpu", "v5p:16x16x28", *CONFIG),
        "the kinds are v4, v5e, v5p, v6e": (*JOB, "--tpu", "v9:4x4", *CONFIG),
    },
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_at_submission(launch, name):
    for message, arguments in MISTAKES[name].items():
        done = launch(name, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), message
        assert message in done.stderr


def test_slurm_refuses_the_workdir_of_another_experiment_at_submission(launch, tmp_path):
    config = load(str(ROOT / "configs" / "gpt2_124m.py"), [])
    with closing(Workdir(tmp_path / "run")) as run:
        run.start(config)
    # without one the workdir starts anew
    (tmp_path / "run" / "checkpoints" / "0").mkdir(parents=True)
    done = launch("slurm", "--workdir", str(tmp_path / "run"), *CONFIG, "--config.model.d_ff=64")
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.model.d_ff: None -> 64 (run -> now)" in done.stderr


def locked(path: Path) -> dict[str, str]:
    """Return the version of each package that a lock file pins for Python 3.13."""
    lines = [line for line in path.read_text().splitlines() if line[:1].isalnum()]
    pins = [Requirement(line.removesuffix("\\").strip()) for line in lines]
    here = {"python_version": "3.13", "python_full_version": "3.13.0", "sys_platform": "linux"}
    return {
        canonicalize_name(p.name): str(p.specifier)
        for p in pins
        if p.marker is None or p.marker.evaluate(default_environment() | here)
    }


@pytest.mark.parametrize(
    ("accelerator", "extra", "package"),
    [
        ("cuda", "cuda13", "jax-cuda13-plugin"),
        ("cuda12", "cuda12", "jax-cuda12-plugin"),
        ("tpu", "tpu", "libtpu"),
    ],
)
def test_accelerator_locks_extend_the_cpu_lock(accelerator, extra, package):
    cpu, lock = (
        locked(ROOT / "requirements.lock"),
        locked(ROOT / "launch" / f"requirements-{accelerator}.lock"),
    )
    assert package in lock
    shared = cpu.keys() & lock.keys()
    assert {name: lock[name] for name in shared} == {name: cpu[name] for name in shared}
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    assert {
        canonicalize_name(Requirement(text).name) for text in project["dependencies"]
    } <= lock.keys()
    assert project["optional-dependencies"][accelerator] == [f"jax[{extra}]"]


def tpu_vm(
    *arguments: str, root: Path = ROOT, dry_run: bool = True, **environment
) -> subprocess.CompletedProcess:
    command = [root / "launch" / "tpu_vm.sh", *(["--dry-run"] if dry_run else []), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_tpu_vm_commands():
    def commands(*arguments: str) -> str:
        done = tpu_vm(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    created = commands("create", "x", "v5litepod-16", "--spot")
    kind = "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot"
    assert created == f"gcloud compute tpus queued-resources create x --node-id=x {kind} \n"
    assert "queued-resources describe x" in commands("status", "x")
    assert "queued-resources delete x --force" in commands("delete", "x")
    assert "--worker=all" in commands("setup", "x")
    started = commands("start", "x", "bucket", "--", "--config", "configs/gpt2_124m.py")
    assert "\\" not in started  # it can be read
    usage = tpu_vm(dry_run=False)
    assert (usage.returncode, "#" in usage.stderr, "tpu_vm.sh create NAME" in usage.stderr) == (
        2,
        False,
        True,
    )
    assert (
        "lm.train --config configs/gpt2_124m.py  --workdir ~/runs/x --resume --platform tpu "
        "--multihost" in started
    )
    assert "pkill" in commands("stop", "x")
    done = tpu_vm("start", "x", "gs://bucket", "--", "--config", "configs/gpt2_124m.py")
    assert (done.returncode, done.stdout, "without gs://" in done.stderr) == (2, "", True)


def test_tpu_vm_quotes_names_for_the_shell_of_the_hosts(tmp_path):
    """A stub of gcloud runs the command as a host does; stubs of the host's programs print their
    arguments.
    """
    programs = dict.fromkeys(("gcsfuse", "nohup"), """printf '<%s>' "$@" >> $HOME/called""")
    programs |= {
        "mountpoint": "exit 1",
        "gcloud": 'for last; do :; done; eval "${last#--command=}"; wait',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    (tmp_path / "lm").mkdir()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = tpu_vm("start", "a b;c", "d e", "--", "--config", "it's $HOME", dry_run=False, **env)
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text()
    assert "<--type-cache-ttl=0><d e>" in called
    assert f"<--config><it's $HOME><--workdir><{tmp_path}/runs/a b;c>" in called


def test_tpu_vm_copies_uncommitted_edits_and_lists_them(tmp_path):
    def git(*arguments: str) -> str:
        author = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        return subprocess.run(
            ["git", *author, *arguments], cwd=tmp_path, capture_output=True, text=True
        ).stdout

    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "tpu_vm.sh", tmp_path / "launch")
    git("init")
    for name in ("edited", "deleted", "kept"):
        (tmp_path / name).write_text("old")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", "--all")
    git("commit", "--message=first")
    (tmp_path / "edited").write_text("new")
    (tmp_path / "added").write_text("new")
    (tmp_path / "ignored").write_text("new")
    (tmp_path / "deleted").unlink()
    before = git("status", "--short")
    done = tpu_vm("setup", "x", root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert before in done.stderr
    tree = done.stdout.splitlines()[0].split()[-1]
    assert git("ls-tree", "--name-only", tree).split() == [
        ".gitignore",
        "added",
        "edited",
        "kept",
        "launch",
    ]
    assert git("show", f"{tree}:edited") == "new"
    assert git("status", "--short") == before


def test_skypilot_file_is_a_task_whose_scripts_parse():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert {"resources", "setup", "run", "num_nodes"} <= task.keys()
    assert "--platform gpu" in task["run"]
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[part], text=True).returncode == 0


def test_skypilot_itself_loads_the_file():
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    task = sky.Task.from_yaml(str(ROOT / "launch" / "skypilot.yaml"))
    assert task.num_nodes == 1
    # the variable is replaced
    assert task.storage_mounts["/runs"].name == task.envs["BUCKET"] == "my-lm-runs"
