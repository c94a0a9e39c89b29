"""Print a run as a JobSet for Google Kubernetes Engine, for kubectl apply -f -.

    python -m launch.gke --name gpt2 --image IMAGE --claim runs --tpu v5e:4x4 \\
        -- --config configs/gpt2_124m.py --config.data.source=tokens:/runs/data/openwebtext
    python -m launch.gke --name gpt2 --image IMAGE --claim runs --gpu h100:16 --pod launch/tcpx.yaml \\
        -- --config configs/gpt2_124m.py --config.data.source=tokens:/runs/data/openwebtext

The workdir is /runs/NAME on a volume that all pods share (--claim, a PersistentVolumeClaim with
ReadWriteMany). If a pod fails or is preempted, JobSet restarts all of them and the run resumes from
its last checkpoint.
"""

import argparse
import math
import re
import sys
from pathlib import Path

import yaml

from launch.arguments import NOT_CHECKED, after_dashes, check_train, compile_step
from lm.config import Config
from lm.cost.devices import DEVICES, Device
from lm.parallel.mesh import check_mesh
from lm.system.errors import UserError, with_exit_code
from lm.system.files import read_bytes
from lm.system.parser import Parser

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
# where GKE mounts the NVIDIA driver; without it CUDA finds no GPU
DRIVER = "/usr/local/nvidia/lib64"


@with_exit_code
def main(argv: list[str] | None = None) -> int:
    """Print the manifest, and return the exit code."""
    args = parse_arguments(argv)
    manifest, config, n_devices = jobset(args)
    if args.check:
        device = f"{(args.tpu or args.gpu).partition(':')[0]}:{n_devices}"
        if code := compile_step(after_dashes(args.train), config, device, args.slices):
            return code
    else:
        print(NOT_CHECKED.format(""), file=sys.stderr)
    print(yaml.safe_dump(manifest, sort_keys=False), end="")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "",
        "Print a run as a JobSet for Google Kubernetes Engine, for kubectl apply -f -.",
        EXAMPLES,
    )
    parser.prog = "python -m launch.gke"
    add = parser.add_argument
    add("--name", required=True, help=f"name of the JobSet; the workdir is {VOLUME}/NAME")
    add("--image", required=True, help="container image, built from launch/Dockerfile")
    add("--claim", required=True, help="PersistentVolumeClaim that all pods can write to")
    machines = parser.add_mutually_exclusive_group(required=True)
    machines.add_argument(
        "--tpu", metavar="KIND:TOPOLOGY", help=f"such as v5e:4x4; kinds: {', '.join(TPUS)}"
    )
    machines.add_argument(
        "--gpu", metavar="KIND:COUNT", help=f"such as h100:16; kinds: {', '.join(GPUS)}"
    )
    add(
        "--slices",
        type=int,
        default=1,
        metavar="N",
        help="TPU slices, which config.mesh.replica must be a multiple of",
    )
    add("--spot", action="store_true", help="use spot nodes, which may be taken away")
    add("--queue", metavar="NAME", help="local queue of Kueue that admits the job")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Secret whose keys become environment variables",
    )
    add(
        "--cpu", type=int, metavar="N", help="CPUs that a pod requests (default: 2 per accelerator)"
    )
    add(
        "--memory",
        metavar="SIZE",
        help="memory that a pod requests, such as 64Gi (default: 8Gi per accelerator)",
    )
    add(
        "--pod",
        type=Path,
        metavar="FILE",
        help="YAML that is merged into the pods: launch/tcpx.yaml, or your own",
    )
    add(
        "--check",
        action="store_true",
        help="first compile the training step for these devices (lm.train --compiled)",
    )
    add("--restarts", type=int, default=100, help="restarts after failures (default: %(default)s)")
    add("train", nargs=argparse.REMAINDER, help="-- and the arguments of python -m lm.train")
    return parser.parse_args(argv)


def jobset(args: argparse.Namespace) -> tuple[dict, Config, int]:
    """Return the manifest, the config of the run, and the number of its accelerators.

    Raises:
        UserError: the name, the machines or the arguments of the run are wrong.
    """
    train = after_dashes(args.train)
    if args.restarts < 0:
        raise UserError(f"--restarts must be at least 0 (it is {args.restarts})")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", args.name):
        advice = "use up to 40 of a-z, 0-9 and -, and begin with a letter"
        raise UserError(f"--name: {args.name!r} is not a valid Kubernetes name; {advice}")
    for option, names in (("queue", [args.queue]), ("secret", args.secret)):
        for name in filter(None, names):
            if not re.fullmatch(NAME_OF_OBJECT, name):
                raise UserError(
                    f"--{option}: {name!r} is not a valid Kubernetes name, such as wandb"
                )
    if args.memory is not None and not re.fullmatch(r"[1-9][0-9]{0,5}[GT]i", args.memory):
        raise UserError(f"--memory: {args.memory!r} is not a size such as 64Gi")
    for option, n in (("cpu", args.cpu), ("slices", args.slices)):
        if n is not None and n < 1:
            raise UserError(f"--{option} must be at least 1 (it is {n})")
    if args.tpu:
        platform = "tpu"
        n_pods, labels, limits, connect = tpu_pods(args.tpu)
    else:
        platform = "gpu"
        n_pods, labels, limits, connect = gpu_pods(args.gpu, args.name)
    per_pod = sum(limits.values())
    total = n_pods * per_pod * args.slices
    workdir = f"the workdir is {VOLUME}/NAME; set --name instead"
    _, config = check_train(train, workdir=workdir, n_devices=total, unchecked=CHECKED_IN_THE_POD)
    if args.slices > 1:
        if not args.tpu or n_pods == 1:
            raise UserError(
                f"--slices {args.slices}: several slices need TPU slices of more than one host"
            )
        check_mesh(config, total, args.slices)
    command = ["python", "-m", "lm.train", "--workdir", f"{VOLUME}/{args.name}"]
    command += [f"--config.data.cache_dir={VOLUME}/cache", "--resume", "--platform", platform]
    container = {
        "name": "train",
        "image": args.image,
        "command": command + connect + train,
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "resources": {
            "limits": limits,
            # The least that a pod gets. Without requests it is the first to be evicted when a node
            # is short of memory.
            "requests": {
                "cpu": str(args.cpu or 2 * per_pod),
                "memory": args.memory or f"{8 * per_pod}Gi",
            },
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": VOLUME},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
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
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"}
        )
    if args.tpu:
        # A node pool of TPUs is one slice and serves one job at a time. A node pool of GPUs can
        # serve several jobs.
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    else:
        container["env"] = [{"name": "LD_LIBRARY_PATH", "value": DRIVER}]
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if tolerations:
        pod["tolerations"] = tolerations
    template = {"spec": pod}
    if args.pod:
        template = merged(template, read_pod(args.pod))
    return _jobset_of_pods(metadata, template, n_pods, args), config, total


def read_pod(path: Path) -> dict:
    """Read the part of a pod in a YAML file; raises UserError if it is missing or something else."""
    try:
        part = yaml.safe_load(read_bytes(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--pod: {path} cannot be read: {str(error).partition(chr(10))[0]}"
        ) from None
    if not isinstance(part, dict) or not part.keys() <= {"metadata", "spec"}:
        raise UserError(
            f"--pod: {path} must have metadata and spec of a pod, as launch/tcpx.yaml has"
        )
    return part


def merged(ours, theirs):
    """Return a part of a manifest merged with that of a file, which takes precedence.

    >>> merged({"env": [{"name": "A", "value": "1"}], "x": 1}, {"env": [{"name": "A", "value": "2"}, {"name": "B"}]})
    {'env': [{'name': 'A', 'value': '2'}, {'name': 'B'}], 'x': 1}
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours | {key: merged(ours.get(key), value) for key, value in theirs.items()}
    if isinstance(ours, list) and isinstance(theirs, list):

        def key(item):
            return (item.get("name"), item.get("mountPath")) if isinstance(item, dict) else item

        new = {key(item): item for item in theirs}
        return [merged(item, new.pop(key(item), item)) for item in ours] + list(new.values())
    return theirs


def _jobset_of_pods(metadata: dict, template: dict, n_pods: int, args: argparse.Namespace) -> dict:
    # Do not retry after a wrong argument (2) or an invalid loss, such as NaN (3): the error would
    # repeat.
    permanent = {
        "onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 3]},
        "action": "FailJob",
    }
    job = {
        "parallelism": n_pods,
        "completions": n_pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [permanent]},
        "template": template,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": args.restarts,
                "rules": [
                    {
                        "name": "permanent",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            # GKE sets MEGASCALE_COORDINATOR_ADDRESS and the like in the pods of several slices.
            "replicatedJobs": [
                {"name": "train", "replicas": args.slices, "template": {"spec": job}}
            ],
        },
    }


def tpu_pods(text: str) -> tuple[int, dict, dict, list[str]]:
    """Read "KIND:TOPOLOGY".

    Returns:
        The number of pods, the node labels, the resources of a pod, and the arguments that connect
        the processes.

    Raises:
        UserError: there is no such slice.
    """
    kind, _, topology = text.partition(":")
    if kind not in TPUS:
        raise UserError(
            f"--tpu: {text!r} is not KIND:TOPOLOGY, such as v5e:4x4; the kinds are "
            f"{', '.join(TPUS)}"
        )
    device = TPUS[kind]
    if not is_slice(device, topology):
        slices = ", ".join(device.slices)
        if device.largest_slice:
            slices += (
                ", and AxBxC with A <= B <= C all multiples of 4 and at most "
                f"{device.largest_slice} chips"
            )
        raise UserError(
            f"--tpu: there is no {kind} slice {topology or '(none given)'}; there are {slices}"
        )
    labels = {
        "cloud.google.com/gke-tpu-accelerator": device.gke,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    n_pods = math.prod(map(int, topology.split("x"))) // device.per_host
    # GKE's environment has the addresses
    return n_pods, labels, {"google.com/tpu": device.per_host}, ["--multihost"]


def is_slice(device: Device, topology: str) -> bool:
    """Return whether GKE has TPU slices of this topology.

    >>> v5e, v5p = TPUS["v5e"], TPUS["v5p"]
    >>> is_slice(v5e, "4x4"), is_slice(v5e, "4x3"), is_slice(v5p, "4x4x12"), is_slice(v5p, "12x4x4")
    (True, False, True, False)
    """
    if topology in device.slices:
        return True
    if not re.fullmatch(r"\d{1,4}x\d{1,4}x\d{1,4}", topology):
        return False
    sides = [int(n) for n in topology.split("x")]
    cubes = sides == sorted(sides) and all(n % 4 == 0 for n in sides)
    return cubes and 0 < math.prod(sides) <= device.largest_slice


def gpu_pods(text: str, name: str) -> tuple[int, dict, dict, list[str]]:
    """Read "KIND:COUNT" for the JobSet `name`; returns and raises as tpu_pods."""
    kind, _, count = text.partition(":")
    if kind not in GPUS or not count.isdecimal() or int(count) < 1:
        raise UserError(
            f"--gpu: {text!r} is not KIND:COUNT, such as h100:16; the kinds are {', '.join(GPUS)}"
        )
    device = GPUS[kind]
    n_gpus = int(count)
    if n_gpus > device.per_host and n_gpus % device.per_host:
        raise UserError(
            f"--gpu: {n_gpus} is not a multiple of the {device.per_host} GPUs of a node"
        )
    n_pods = max(1, n_gpus // device.per_host)
    connect = []
    if n_pods > 1:
        # JobSet names its pods JOBSET-JOB-0-INDEX.JOBSET, and Kubernetes sets the index in each
        # pod's environment.
        connect = ["--coordinator_address", f"{name}-train-0-0.{name}:{PORT}"]
        connect += ["--num_processes", str(n_pods), "--process_id", "$(JOB_COMPLETION_INDEX)"]
    labels = {"cloud.google.com/gke-accelerator": device.gke}
    return n_pods, labels, {"nvidia.com/gpu": min(n_gpus, device.per_host)}, connect


if __name__ == "__main__":
    sys.exit(main())
