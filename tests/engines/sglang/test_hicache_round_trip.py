from __future__ import annotations
import pytest
from hicaches import back_up, controller, device_pool, host_pool, prefetch
from serving import running_server

TOKENS = list(range(10 * 128))

@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running

@pytest.mark.parametrize("hybrid",[False,True])
def test_pages(server, hybrid):
    device = device_pool()
    pool = host_pool(device)
    with controller(server.target, pool, device, hybrid=hybrid) as one:
        names, pages, saved = back_up(one, TOKENS, seed=1)
        assert saved == 1280
    pool = host_pool(device)
    with controller(server.target, pool, device, hybrid=hybrid) as two:
        found, came, took = prefetch(two, TOKENS)
        assert found==1280
        assert came == pages
