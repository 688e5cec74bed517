"""The client against the real server: what is put is what is got, in every process. Sick servers: test_sick_server.py."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from kvstore_client import NamespaceSpec
from serving import running_server

SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=114_688)
PATIENT_S = 60  # for what must succeed on a busy machine; the budgets themselves are tested against stalled servers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("data"), "--capacity", "2GiB") as server:
        yield server


def new_tokens(blocks: int) -> np.ndarray:
    """Token ids that no other test has."""
    return np.frombuffer(random.randbytes(blocks * 512), dtype="<u4")


PROCESS_SCRIPT = """
import multiprocessing, os, sys, threading
import numpy as np
from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec

SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=114_688)
DATA = np.arange(4 * 114_688, dtype=np.uint8)

def use(namespace):
    chain, out = namespace.chain(range(4 * 128)), np.zeros_like(DATA)
    report = namespace.put(chain, DATA)
    result = namespace.get(chain, out)
    assert report.stored + report.exists == 4 and result.leading_blocks == 4, (report, result)
    assert np.array_equal(out, DATA)

def spawned(target):
    with KVStoreClient(ClientConfig(target=target, base_budget_s=60)) as client:
        use(client.namespace(SPEC))

def work_until(stop, namespace):
    while not stop.is_set():
        use(namespace)

def main(target, start_method):
    client = KVStoreClient(ClientConfig(target=target, base_budget_s=60))
    namespace, stop = client.namespace(SPEC), threading.Event()
    use(namespace)
    # The parent goes on meanwhile, but for "fork": its threads are in calls when a child is to be made.
    threads = [threading.Thread(target=work_until, args=(stop, namespace)) for _ in range(2)]
    for thread in threads:
        thread.start()
    if start_method == "fork":
        stop.set()
        for thread in threads:
            thread.join()
    codes = []
    if start_method == "spawn":
        children = [multiprocessing.get_context("spawn").Process(target=spawned, args=(target,)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            codes.append(child.exitcode)
    else:
        for number in range(6):
            pid = os.fork()
            if pid == 0:
                use(namespace)
                use(client.namespace(SPEC))
                grandchild = os.fork()
                if grandchild == 0:
                    use(namespace)
                    os._exit(0)
                assert os.waitpid(grandchild, 0)[1] == 0
                if number % 3 == 1:
                    client.close()
                if number % 3 == 2:
                    os._exit(0)
                sys.exit(0)
            codes.append(os.waitpid(pid, 0)[1])
    stop.set()
    for thread in threads:
        thread.join()
    use(namespace)
    client.close()
    assert not any(codes), codes
    print("ended")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn", "fork in a call"])
def test_client_works_in_other_processes_and_none_hangs_at_exit(server, tmp_path, start_method):
    script = tmp_path / "processes.py"
    script.write_text(PROCESS_SCRIPT)
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", script, server.target, start_method],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (run.stdout, run.returncode) == ("ended\n", 0), run.stderr
