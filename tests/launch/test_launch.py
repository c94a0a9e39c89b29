"""What the launchers write: job scripts, manifests and commands that their engines would take."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lm import parameters
from lm.config.loading import load
from lm.parallel.mesh import check_mesh

ROOT = Path(__file__).parents[2]
CONFIG = ("--", "--config", "configs/gpt2_124m.py", "--config.mesh.fsdp=8")


def launch(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"launch.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_slurm_script(tmp_path):
    workdir = tmp_path / "a run"
    options = (
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--workdir",
        str(workdir),
        "--sbatch=--partition=gpu --account=me",
    )
    done = launch("slurm", *options, "--dry-run", *CONFIG)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "job.sh"
    script.write_text(done.stdout)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    lines = done.stdout.splitlines()
    for option in ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "account=me", "requeue"):
        assert f"#SBATCH --{option}" in lines
    assert f"lm.train --config configs/gpt2_124m.py --config.mesh.fsdp=8 --workdir '{workdir}' --resume" in done.stdout
    assert f"#SBATCH --output='{workdir}/slurm.log'" in lines
    assert not workdir.exists()
    done = launch("slurm", "--nodes", "2", "--dry-run", *CONFIG)
    assert f"--workdir {ROOT / 'runs' / 'gpt2_124m'} --resume" in done.stdout


@pytest.mark.parametrize("path", ["README.md", "launch/README.md", "launch/gke.py", "launch/slurm.py"])
def test_the_commands_that_are_shown_fit_their_machines(path):
    text = re.sub(r"\\+\n\s*", "", (ROOT / path).read_text())
    found = re.findall(r"-- --config (configs/\w+\.py)((?: --config\.\S+)*)", text)
    assert found
    for config, overrides in found:
        loaded = load(str(ROOT / config), [word.removeprefix("--config.") for word in overrides.split()])
        for n_devices in (8, 16, 32):
            check_mesh(parameters.resolve(loaded, loaded.model.vocab_size), n_devices)


def test_a_sweep_is_an_array_of_jobs_of_one_task(tmp_path):
    sweep = ("--", "--config", "configs/sweeps/positions.py", "--budget", "full")
    options = ("--array", "3", "--gpus-per-node", "4", "--workdir", str(tmp_path / "sweep"))
    done = launch("slurm", *options, "--dry-run", *sweep)
    lines = done.stdout.splitlines()
    for option in ("array=0-2", "nodes=1", "ntasks-per-node=1", "gpus-per-node=4", f"output={tmp_path}/sweep-%a.log"):
        assert f"#SBATCH --{option}" in lines
    assert f"lm.sweep --config configs/sweeps/positions.py --budget full --workdir {tmp_path}/sweep\n" in done.stdout
    assert "scontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID};" in done.stdout
    done = launch("slurm", "--nodes", "2", *options, *sweep)
    assert (done.returncode, "each job of a sweep has one node" in done.stderr) == (2, True)


GPUS = ("--name", "gpt2", "--image", "an/image", "--claim", "runs", "--gpu", "h100:16")
TPUS = (*GPUS[:-2], "--tpu", "v5e:4x8")


@pytest.mark.parametrize(("machines", "pods", "devices"), [(GPUS, 2, 8), (TPUS, 8, 4)])
def test_a_jobset_is_one_by_the_published_schema(machines, pods, devices):
    """Kubeflow publishes models made from the schemas of JobSet and Kubernetes; they drop what they do not know."""
    done = launch("gke", *machines, *CONFIG)
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(done.stdout)
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == pods
    (container,) = job["template"]["spec"]["containers"]
    assert list(container["resources"]["limits"].values()) == [devices]
    assert container["command"][:3] == ["python", "-m", "lm.train"]
    assert container["command"][-3:] == list(CONFIG[1:])


def test_the_schema_would_find_a_misspelled_key():
    manifest = yaml.safe_load(launch("gke", *GPUS, *CONFIG).stdout)
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 2
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() != manifest


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("slurm", ("--workdir", "runs/x"), "give the run after two dashes"),
        ("slurm", ("--workdir", "runs/x", "--nodes", "0", *CONFIG), "give at least 1 node"),
        ("slurm", ("--workdir", "runs/x", *CONFIG, "--workdir=elsewhere"), "--workdir belongs before"),
        ("slurm", ("--time", "2", *CONFIG), "the last 2 are for saving"),
        ("slurm", ("--sbatch=--comment='x", *CONFIG), "No closing quotation"),
        ("slurm", ("--", "--config", "configs/none.py"), "there is no such file"),
        ("gke", ("--name", "GPT_2", *GPUS[2:], *CONFIG), "no name to Kubernetes"),
        ("gke", (*TPUS[:-1], "v5e:0x4", *CONFIG), "0 chips"),
        ("gke", (*GPUS, "--", "--config.mesh.fsdp=8"), "give the run after two dashes"),
        ("gke", (*GPUS[:-1], "h100:12", *CONFIG), "12 is not a multiple of the 8 GPUs"),
        ("gke", (*GPUS[:-1], "h900:8", *CONFIG), "one of|kind of"),
        ("gke", (*TPUS[:-1], "v5e:3x3", *CONFIG), "9 chips"),
        ("gke", GPUS, "give the run after two dashes"),
    ],
)
def test_mistakes_are_told(name, arguments, said):
    done = launch(name, *arguments)
    assert done.returncode == 2
    assert any(part in done.stderr for part in said.split("|")), done.stderr
    assert "Traceback" not in done.stderr


def locked(path: Path) -> dict[str, str]:
    """The versions that a lock file gives Python 3.11, by package."""
    lines = [line for line in path.read_text().splitlines() if line[:1].isalnum()]
    pins = [Requirement(line.removesuffix("\\").strip()) for line in lines]
    here = {"python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux"}
    return {
        canonicalize_name(p.name): str(p.specifier)
        for p in pins
        if p.marker is None or p.marker.evaluate(default_environment() | here)
    }


@pytest.mark.parametrize(("accelerator", "package"), [("cuda", "jax-cuda13-plugin"), ("tpu", "libtpu")])
def test_the_accelerators_locks_are_that_of_the_cpu_and_more(accelerator, package):
    cpu, lock = locked(ROOT / "requirements.lock"), locked(ROOT / "launch" / f"requirements-{accelerator}.lock")
    assert package in lock
    shared = cpu.keys() & lock.keys()
    assert {name: lock[name] for name in shared} == {name: cpu[name] for name in shared}
    with open(ROOT / "pyproject.toml", "rb") as file:
        needed = {canonicalize_name(Requirement(text).name) for text in tomllib.load(file)["project"]["dependencies"]}
    assert needed <= lock.keys()


def test_commands_for_tpu_vms():
    def commands(*arguments: str) -> str:
        command = [ROOT / "launch" / "tpu_vm.sh", "--dry-run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tpu-vm create x --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot" in commands(
        "create", "x", "v5litepod-16", "--spot"
    )
    assert "--worker=all" in commands("setup", "x")
    started = commands("start", "x", "bucket", "--", "--config", "configs/gpt2_124m.py").replace("\\", "")
    assert "lm.train --config configs/gpt2_124m.py  --workdir ~/runs/x --resume --multihost" in started
    assert "pkill" in commands("stop", "x")


def test_skypilots_file_has_its_keys():
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    assert {"resources", "setup", "run", "num_nodes"} <= task.keys()
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[part], text=True).returncode == 0
