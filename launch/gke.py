"""Print a run as a JobSet for Google Kubernetes Engine: python -m launch.gke ... -- --config FILE | kubectl apply -f -

    python -m launch.gke --name gpt2 --image IMAGE --claim runs --tpu v5e:4x4 \\
        -- --config configs/gpt2_124m.py --config.data.source=tokens:/runs/data/openwebtext
    python -m launch.gke --name gpt2 --image IMAGE --claim runs --gpu h100:16 \\
        -- --config configs/gpt2_124m.py --config.data.source=tokens:/runs/data/openwebtext

The workdir is /runs/NAME on a volume that all pods share (--claim, a PersistentVolumeClaim with ReadWriteMany). If a
pod fails or is preempted, JobSet restarts all of them and the run resumes from its last checkpoint.
"""

import argparse
import math
import re
import subprocess
import sys

import yaml

from launch.arguments import after_dashes, check_train
from lm.cost.devices import DEVICES, Gke
from lm.errors import UserError, with_exit_code

TPUS = {name: device for name, device in DEVICES.items() if device.gke and device.platform == "tpu"}
GPUS = {name: device for name, device in DEVICES.items() if device.gke and device.platform == "gpu"}
PORT = 8476
VOLUME = "/runs"  # where pods mount the claim
USER = 1000  # of launch/Dockerfile
NAME_OF_OBJECT = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
SECONDS_TO_SAVE = 300  # between SIGTERM and the end of a pod; a spot node leaves 15 to 30
CHECKED_IN_THE_POD = ("--config.log.wandb",)  # it needs a package of the image
EXAMPLES = """\
examples:
  python -m launch.gke --name gpt2 --image IMAGE --claim runs --gpu h100:16 -- --config configs/gpt2_124m.py
  python -m launch.gke --name gpt2 --image IMAGE --claim runs --tpu v5e:4x4 -- --config configs/gpt2_124m.py
"""
DRIVER = "/usr/local/nvidia/lib64"  # where GKE mounts the NVIDIA driver; without it CUDA finds no GPU


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return print_manifest(parse_arguments(argv))


def print_manifest(args: argparse.Namespace) -> int:
    """Print the manifest, and return the exit code."""
    manifest = jobset(args)
    if args.check:
        device = f"{(args.tpu or args.gpu).partition(':')[0]}:{n_devices(manifest)}"
        plan = ["--plan", "--compiled", "--device", device]
        command = [sys.executable, "-m", "lm.train", *after_dashes(args.train), *plan]
        if code := subprocess.run(command, stdout=sys.stderr).returncode:  # stdout is for kubectl
            return code
    print(yaml.safe_dump(manifest, sort_keys=False), end="")
    return 0


def n_devices(manifest: dict) -> int:
    """Return the number of accelerators of all pods of a manifest."""
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job["parallelism"] * sum(container["resources"]["limits"].values())


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.gke",
        description="Print a run as a JobSet for Google Kubernetes Engine, for kubectl apply -f -.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--name", required=True, help=f"name of the JobSet; the workdir is {VOLUME}/NAME")
    parser.add_argument("--image", required=True, help="container image, built from launch/Dockerfile")
    parser.add_argument("--claim", required=True, help="PersistentVolumeClaim that all pods can write to")
    machines = parser.add_mutually_exclusive_group(required=True)
    machines.add_argument("--tpu", metavar="KIND:TOPOLOGY", help=f"such as v5e:4x4; kinds: {', '.join(TPUS)}")
    machines.add_argument("--gpu", metavar="KIND:COUNT", help=f"such as h100:16; kinds: {', '.join(GPUS)}")
    add = parser.add_argument
    add("--spot", action="store_true", help="use spot nodes, which may be taken away")
    add("--queue", metavar="NAME", help="local queue of Kueue that admits the job")
    add("--secret", action="append", default=[], metavar="NAME", help="Secret whose keys become environment variables")
    add("--cpu", type=int, metavar="N", help="CPUs that a pod requests (default: 2 per accelerator)")
    add("--memory", metavar="SIZE", help="memory that a pod requests, such as 64Gi (default: 8Gi per accelerator)")
    add("--check", action="store_true", help="first compile the training step for these devices (lm.train --compiled)")
    parser.add_argument("--restarts", type=int, default=100, help="restarts after failures (default: %(default)s)")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- and the arguments of python -m lm.train")
    return parser.parse_args(argv)


def jobset(args: argparse.Namespace) -> dict:
    """Return the manifest.

    Raises:
        UserError: the name, the machines or the arguments of the run are wrong.
    """
    train = after_dashes(args.train)
    if args.restarts < 0:
        raise UserError(f"--restarts must be at least 0 (it is {args.restarts})")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", args.name):
        raise UserError(
            f"--name: {args.name!r} is not a valid Kubernetes name; use up to 40 of a-z, 0-9 and -, and begin with a "
            "letter"
        )
    for option, names in {"queue": [args.queue] if args.queue else [], "secret": args.secret}.items():
        if wrong := [name for name in names if not re.fullmatch(NAME_OF_OBJECT, name)]:
            raise UserError(f"--{option}: {wrong[0]!r} is not a valid Kubernetes name, such as wandb")
    if args.memory is not None and not re.fullmatch(r"[1-9][0-9]{0,5}[GT]i", args.memory):
        raise UserError(f"--memory: {args.memory!r} is not a size such as 64Gi")
    if args.cpu is not None and args.cpu < 1:
        raise UserError(f"--cpu must be at least 1 (it is {args.cpu})")
    platform = "tpu" if args.tpu else "gpu"
    n_pods, labels, limits, connect = tpu_pods(args.tpu) if args.tpu else gpu_pods(args.gpu, args.name)
    per_pod = sum(limits.values())
    check_train(
        train,
        workdir=f"the workdir is {VOLUME}/NAME; set --name instead",
        n_devices=n_pods * per_pod,
        unchecked=CHECKED_IN_THE_POD,
    )
    files = ["--workdir", f"{VOLUME}/{args.name}", f"--config.data.cache_dir={VOLUME}/cache"]
    container = {
        "name": "train",
        "image": args.image,
        "command": ["python", "-m", "lm.train", *files, "--resume", "--platform", platform, *connect, *train],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "resources": {
            "limits": limits,
            # The least that a pod gets. Without requests it is the first to be evicted when a node is short of memory.
            "requests": {"cpu": str(args.cpu or 2 * per_pod), "memory": args.memory or f"{8 * per_pod}Gi"},
        },
        "volumeMounts": [{"name": "runs", "mountPath": VOLUME}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        "securityContext": {"fsGroup": USER},  # so that the image's user can write to the claim
        "nodeSelector": labels,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": args.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    metadata = {"name": args.name}
    if args.secret:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in args.secret]
    if args.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": args.queue}
    tolerations = []
    if args.spot:
        labels["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"})
    if args.tpu:
        # A node pool of TPUs is one slice and serves one job at a time. A node pool of GPUs can serve several jobs.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    else:
        container["env"] = [{"name": "LD_LIBRARY_PATH", "value": DRIVER}]
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if tolerations:
        pod["tolerations"] = tolerations
    return _jobset_of_pods(metadata, pod, n_pods, args.restarts)


def _jobset_of_pods(metadata: dict, pod: dict, n_pods: int, restarts: int) -> dict:
    # Do not retry after a wrong argument (2) or an invalid loss, such as NaN (3): the error would repeat.
    permanent = {"onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 3]}, "action": "FailJob"}
    job = {
        "parallelism": n_pods,
        "completions": n_pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [permanent]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": restarts,
                "rules": [{"name": "permanent", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": job}}],
        },
    }


def tpu_pods(text: str) -> tuple[int, dict, dict, list[str]]:
    """Read "KIND:TOPOLOGY".

    Returns:
        The number of pods, the node labels, the resources of a pod, and the arguments that connect the processes.

    Raises:
        UserError: there is no such slice.
    """
    kind, _, topology = text.partition(":")
    if kind not in TPUS:
        raise UserError(f"--tpu: {text!r} is not KIND:TOPOLOGY, such as v5e:4x4; the kinds are {', '.join(TPUS)}")
    device = TPUS[kind]
    if not is_slice(device.gke, topology):
        slices = ", ".join(device.gke.topologies)
        if device.gke.largest_slice:
            slices += f", and AxBxC with A <= B <= C all multiples of 4 and at most {device.gke.largest_slice} chips"
        raise UserError(f"--tpu: there is no {kind} slice {topology or '(none given)'}; there are {slices}")
    labels = {
        "cloud.google.com/gke-tpu-accelerator": device.gke.label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    n_pods = math.prod(map(int, topology.split("x"))) // device.per_host
    return n_pods, labels, {"google.com/tpu": device.per_host}, ["--multihost"]  # GKE's environment has the rest


def is_slice(gke: Gke, topology: str) -> bool:
    """Return whether GKE has TPU slices of this topology.

    >>> v5e, v5p = TPUS["v5e"].gke, TPUS["v5p"].gke
    >>> is_slice(v5e, "4x4"), is_slice(v5e, "4x3"), is_slice(v5p, "4x4x12"), is_slice(v5p, "12x4x4")
    (True, False, True, False)
    """
    if topology in gke.topologies:
        return True
    if not re.fullmatch(r"\d{1,4}x\d{1,4}x\d{1,4}", topology):
        return False
    sides = [int(n) for n in topology.split("x")]
    return sides == sorted(sides) and all(n % 4 == 0 for n in sides) and 0 < math.prod(sides) <= gke.largest_slice


def gpu_pods(text: str, name: str) -> tuple[int, dict, dict, list[str]]:
    """Read "KIND:COUNT" for the JobSet `name`; returns and raises as tpu_pods."""
    kind, _, count = text.partition(":")
    if kind not in GPUS or not count.isdecimal() or int(count) < 1:
        raise UserError(f"--gpu: {text!r} is not KIND:COUNT, such as h100:16; the kinds are {', '.join(GPUS)}")
    device, n_gpus = GPUS[kind], int(count)
    if n_gpus > device.per_host and n_gpus % device.per_host:
        raise UserError(f"--gpu: {n_gpus} is not a multiple of the {device.per_host} GPUs of a node")
    n_pods = max(1, n_gpus // device.per_host)
    # JobSet names its pods JOBSET-JOB-0-INDEX.JOBSET, and Kubernetes sets the index in each pod's environment.
    connect = [
        "--coordinator_address", f"{name}-train-0-0.{name}:{PORT}",
        "--num_processes", str(n_pods), "--process_id", "$(JOB_COMPLETION_INDEX)",
    ]  # fmt: skip
    labels = {"cloud.google.com/gke-accelerator": device.gke.label}
    return n_pods, labels, {"nvidia.com/gpu": min(n_gpus, device.per_host)}, connect if n_pods > 1 else []


if __name__ == "__main__":
    sys.exit(main())
