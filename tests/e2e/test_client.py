"""The client against the real server: what is put is what is got, in every process, through crashes and stalls."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec
from serving import running_server, start_server

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


def test_stopped_server_costs_the_budget_and_one_line_and_serves_again_when_continued(tmp_path, caplog):
    with (
        running_server(tmp_path / "data") as server,
        KVStoreClient(ClientConfig(target=server.target)) as client,
    ):
        namespace = client.namespace(SPEC)
        blocks = 256
        chain, data = namespace.chain(new_tokens(blocks)), random.randbytes(blocks * SPEC.block_bytes)
        assert namespace.put(chain, data, budget_s=PATIENT_S).stored == blocks
        out = bytearray(len(data))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            results = [namespace.get(chain, out) for _ in range(3)]
            assert [result.failure.reason for result in results] == ["DEADLINE"] * 3
            assert namespace.put(chain, data).failure.reason == "DEADLINE"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        result = namespace.get(chain, out, budget_s=PATIENT_S)
        assert (result.leading_blocks, result.failure) == (blocks, None)
        assert out == data
    assert [record.levelname for record in caplog.records if record.name == "kvstore_client"] == ["WARNING"]


def test_server_killed_under_load_is_found_again_by_itself_and_never_answers_wrong(tmp_path):
    """Readers go on through two kills; whatever they get is right, and the hits come back without their doing."""
    data_dir, wrong, hits = tmp_path / "data", [], [0] * 4
    server = start_server(data_dir, tmp_path)
    listen = server.target
    blocks, stop = 16, threading.Event()
    try:
        with KVStoreClient(ClientConfig(target=listen, base_budget_s=5)) as client:
            namespace = client.namespace(SPEC)
            chain, data = namespace.chain(new_tokens(blocks)), random.randbytes(blocks * SPEC.block_bytes)
            assert namespace.put(chain, data, budget_s=PATIENT_S).stored == blocks

            def work(number: int) -> None:
                out = bytearray(len(data))
                while not stop.is_set():
                    result = namespace.get(chain, out, lease=namespace.match(chain).lease)
                    right = [
                        out[i * SPEC.block_bytes : (i + 1) * SPEC.block_bytes]
                        == data[i * SPEC.block_bytes : (i + 1) * SPEC.block_bytes]
                        for i in range(blocks)
                    ]
                    wrong.extend(
                        (number, i) for i, status in enumerate(result.statuses) if status == "OK" and not right[i]
                    )
                    hits[number] += result.leading_blocks == blocks

            threads = [threading.Thread(target=work, args=(number,)) for number in range(len(hits))]
            for thread in threads:
                thread.start()
            try:
                for _ in range(2):
                    server.kill()
                    server = start_server(data_dir, tmp_path, listen=listen)
                    before = list(hits)
                    while any(now <= then for now, then in zip(hits, before, strict=True)):
                        time.sleep(0.01)
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
        assert wrong == []
    finally:
        server.kill()


def test_server_that_lost_its_data_gets_to_know_the_namespace_again(tmp_path):
    data_dir = tmp_path / "data"
    server = start_server(data_dir, tmp_path)
    try:
        with KVStoreClient(ClientConfig(target=server.target, base_budget_s=PATIENT_S)) as client:
            namespace = client.namespace(SPEC)
            chain, data = namespace.chain(new_tokens(2)), random.randbytes(2 * SPEC.block_bytes)
            assert namespace.put(chain, data).stored == 2
            server.kill()
            shutil.rmtree(data_dir)
            server = start_server(data_dir, tmp_path, listen=server.target)
            while (match := namespace.match(chain)).failure is not None:
                time.sleep(0.01)  # until the connection is made anew
            assert match.hit_length_blocks == 0
            assert namespace.put(chain, data).stored == 2
            assert namespace.match(chain).hit_length_blocks == 2
    finally:
        server.kill()
