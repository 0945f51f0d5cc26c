"""A process that starts itself anew to keep its memory is still itself."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from block_recurrent.kept_memory import keep_memory
print(os.getpid(), flush=True)
keep_memory()
print(os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
@pytest.mark.parametrize("given", [None, "glibc.malloc.hugetlb=0"])
def test_the_process_keeps_its_number_and_arguments(given):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if given:
        environment["GLIBC_TUNABLES"] = given
    command = [sys.executable, "-c", PROGRAM, "--some=argument"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *numbers, told = run.stdout.splitlines()
    assert len(numbers) == (1 if given else 2) and len(set(numbers)) == 1
    assert told.endswith("['--some=argument']")
    assert told.startswith(given or "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1")
