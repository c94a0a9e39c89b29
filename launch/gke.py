"""Render a run as a JobSet for Google Kubernetes Engine: python -m launch.gke ... -- --config FILE | kubectl apply -f -

    python -m launch.gke --name gpt2 --image IMAGE --claim runs --tpu v5e:4x4 \\
        -- --config configs/gpt2_124m.py --config.data.source=tokens:/runs/data/openwebtext
    python -m launch.gke --name gpt2 --image IMAGE --claim runs --gpu h100:16 \\
        -- --config configs/gpt2_124m.py --config.data.source=tokens:/runs/data/openwebtext

The run lives in /runs/NAME on a volume that all pods share (--claim: a PersistentVolumeClaim with ReadWriteMany). A pod
that fails or is preempted makes JobSet start all of them again, and the run goes on from its last checkpoint.
"""

import argparse
import math
import re
import sys

import yaml

from launch.slurm import config_of

CHIPS_A_HOST = 4
TPUS = {  # Google Cloud's "TPU in GKE": the value of the node label gke-tpu-accelerator
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
GPUS = {  # Google Cloud's "GPUs in GKE": the value of gke-accelerator, and how many a node has
    "a100": ("nvidia-a100-80gb", 8),
    "h100": ("nvidia-h100-80gb", 8),
    "h200": ("nvidia-h200-141gb", 8),
    "l4": ("nvidia-l4", 8),
}
PORT = 8476


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.gke", description="Render a run as a JobSet.")
    parser.add_argument("--name", required=True, help="of the JobSet, and of the run's directory")
    parser.add_argument("--image", required=True, help="built from launch/Dockerfile")
    parser.add_argument("--claim", required=True, help="a PersistentVolumeClaim that all pods may write to")
    machines = parser.add_mutually_exclusive_group(required=True)
    machines.add_argument("--tpu", metavar="KIND:TOPOLOGY", help=f"v5e:4x4, for example; one of {', '.join(TPUS)}")
    machines.add_argument("--gpu", metavar="KIND:COUNT", help=f"h100:16, for example; one of {', '.join(GPUS)}")
    parser.add_argument("--restarts", type=int, default=100, help="how often to go on after a failure (%(default)s)")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- and the arguments of python -m lm.train")
    a = parser.parse_args(argv)
    try:
        print(yaml.safe_dump(jobset(a), sort_keys=False), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def jobset(a) -> dict:
    """The manifest; raises ValueError for what cannot be rendered."""
    if a.train[:1] != ["--"] or config_of(a.train) is None:
        raise ValueError("give the run after two dashes: -- --config FILE")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", a.name):
        raise ValueError(f"--name: {a.name!r} is no name to Kubernetes; use up to 40 of a-z, 0-9 and -, a letter first")
    n_pods, selector, limits, connect = machines(a)
    kept = ["--workdir", f"/runs/{a.name}", "--config.data.cache_dir=/runs/cache"]
    command = ["python", "-m", "lm.train", *kept, "--resume", *connect, *a.train[1:]]
    container = {
        "name": "train",
        "image": a.image,
        "command": command,
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,  # to save, after SIGTERM; a spot node that is taken away leaves 15 to 30
        "nodeSelector": selector,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": a.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if "nvidia.com/gpu" in limits:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    # A mistake (2) or a loss that is not finite (3) would only come again.
    hopeless = {"onExitCodes": {"containerName": "train", "operator": "In", "values": [2, 3]}, "action": "FailJob"}
    job = {
        "parallelism": n_pods,
        "completions": n_pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [hopeless]},
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        # All pods in one node pool, which is one slice.
        "metadata": {
            "name": a.name,
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {
                "maxRestarts": a.restarts,
                "rules": [{"name": "hopeless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": job}}],
        },
    }


def machines(a) -> tuple[int, dict, dict, list[str]]:
    """(pods, node labels, what a pod takes of its node, how its process finds the others)."""
    kind, _, size = (a.tpu or a.gpu).partition(":")
    if a.tpu:
        if kind not in TPUS or not all(n.isdecimal() for n in size.split("x")):
            raise ValueError(
                f"--tpu: {a.tpu!r} is not KIND:TOPOLOGY with a kind of {', '.join(TPUS)}; v5e:4x4, for example"
            )
        chips = math.prod(int(n) for n in size.split("x"))
        if chips < 1 or chips % CHIPS_A_HOST:
            raise ValueError(
                f"--tpu: {size} has {chips} chips; slices of several hosts have a multiple of {CHIPS_A_HOST}"
            )
        labels = {"cloud.google.com/gke-tpu-accelerator": TPUS[kind], "cloud.google.com/gke-tpu-topology": size}
        return (
            chips // CHIPS_A_HOST,
            labels,
            {"google.com/tpu": CHIPS_A_HOST},
            ["--multihost"],
        )  # GKE tells JAX the rest
    if kind not in GPUS or not size.isdecimal() or int(size) < 1:
        raise ValueError(f"--gpu: {a.gpu!r} is not KIND:COUNT with a kind of {', '.join(GPUS)}; h100:16, for example")
    label, a_node = GPUS[kind]
    if int(size) > a_node and int(size) % a_node:
        raise ValueError(f"--gpu: {size} is not a multiple of the {a_node} GPUs of a node")
    n_pods, each = max(1, int(size) // a_node), min(int(size), a_node)
    # JobSet names its pods JOBSET-JOB-0-INDEX.JOBSET, and Kubernetes puts the index into each one's environment.
    connect = [
        "--coordinator_address", f"{a.name}-train-0-0.{a.name}:{PORT}",
        "--num_processes", str(n_pods), "--process_id", "$(JOB_COMPLETION_INDEX)",
    ]  # fmt: skip
    return n_pods, {"cloud.google.com/gke-accelerator": label}, {"nvidia.com/gpu": each}, connect if n_pods > 1 else []


if __name__ == "__main__":
    sys.exit(main())
