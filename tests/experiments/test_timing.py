"""What benchmarks share."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from experiments.bench.timing import keep_memory

assert sys.argv[1] == "give back" or keep_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    np.ones(2**24, np.float32)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_memory_that_is_kept_has_no_fresh_pages():
    def faults_of(what):
        done = subprocess.run([sys.executable, "-c", FAULTS, what], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults_of("keep") < 10 < faults_of("give back")
