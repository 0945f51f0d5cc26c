"""A job as a JobSet for Google Kubernetes Engine: launch/jobset.yaml with its placeholders filled in."""

import json
from pathlib import Path
from string import Template

from block_recurrent.errors import UserError
from launch.jobs import Job

# GKE's names of node pools' accelerators.
ACCELERATORS = {"v4": "tpu-v4-podslice", "v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}


NAME_LETTERS = 63  # of a pod, in Kubernetes


def render(job: Job, image: str) -> str:
    room = NAME_LETTERS - len(f"-slice-{job.tpus.slices - 1}-{job.tpus.hosts - 1}-abcde")  # behind it in a pod's name
    if len(job.name) > room:
        raise UserError(f"{job.name} is too long a name for a JobSet of {job.slice}: use up to {room} letters")
    tpus, lines = job.tpus, (Path(__file__).parent / "jobset.yaml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if job.spot or "with --spot alone" not in line]
    return Template("".join(kept)).substitute(
        NAME=job.name,
        IMAGE=image,
        SLICES=tpus.slices,
        HOSTS=tpus.hosts,
        CHIPS=tpus.chips_per_host,
        ACCELERATOR=ACCELERATORS[tpus.generation],
        TOPOLOGY=tpus.topology.partition(":")[2],
        REPOSITORY=json.dumps(job.repository),
        COMMIT=json.dumps(job.commit),
        # Kubernetes puts in what $(NAME) is; $$(NAME) stays as it was written.
        ARGUMENTS=json.dumps([f"--workdir={job.workdir}", *job.arguments]).replace("$(", "$$("),
    )
