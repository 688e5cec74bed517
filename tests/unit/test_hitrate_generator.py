"""The workload generator: the same bytes for a seed, chains that are trees, and traffic with the shape that its files promise."""

import hashlib
import re

import numpy as np
import pytest

from kvstore_bench.hitrate.generator import generate, load_parameters, named_workloads
from kvstore_bench.hitrate.generator_draws import return_gap_s, start_s
from kvstore_bench.hitrate.workload import WorkloadError
from kvstore_bench.units import DAY_S

AGENT, CHATBOT = 0, 1


def parameters_of(tmp_path, changes="", base="tiny"):
    path = tmp_path / "changed.toml"
    path.write_text(f'based_on = "{base}"\n{changes}')
    return load_parameters(path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The default workload with fewer sessions."""
    return generate(parameters_of(tmp_path_factory.mktemp("mixed"), "[traffic]\nscale = 0.2", base="mixed"), seed=1)


@pytest.fixture(scope="module")
def tiny():
    return generate(load_parameters(named_workloads()["tiny"]), seed=1)


def columns(workload):
    of_requests = workload.time_s, workload.class_id, workload.session, workload.input_tokens, workload.asked_blocks
    return *of_requests, workload.starts, workload.blocks


def checksum(workload):
    digest = hashlib.sha256()
    for column in columns(workload):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def by_session(workload):
    """Requests in the order of sessions and, in those, of time."""
    return np.lexsort((workload.time_s, workload.session))


def previous_pairs(workload, class_id):
    """Numbers of requests of a class, and of those before them in their sessions."""
    order = by_session(workload)
    first, second = order[:-1], order[1:]
    both = (workload.session[first] == workload.session[second]) & (workload.class_id[first] == class_id)
    return second[both], first[both]


def share_of_hits(workload, class_id, ttl_s):
    """Token-weighted hit rate of a class with unlimited capacity, blocks living for a time after their last use."""
    last_use = np.full(workload.unique_blocks, -np.inf)
    hit_blocks = np.zeros(workload.requests, np.int64)
    for request, now in enumerate(workload.time_s):
        oldest = np.maximum.accumulate(now - last_use[workload.asked(request)])
        hit_blocks[request] = np.searchsorted(oldest, ttl_s)
        last_use[workload.chain(request)] = now
    counted = workload.measured & (workload.class_id == class_id)
    return hit_blocks[counted].sum() * workload.block_tokens / workload.input_tokens[counted].sum()


# The same bytes


def test_a_seed_gives_the_same_bytes_on_every_machine(tiny):
    # It changes with the draws or the parameters, and then no figure published for a seed holds any more.
    assert checksum(tiny) == "69cc441a85e414fc854fb0caee80ad24600d6ea0c2b4f85a2aa33742b2c5ec71"


def test_another_seed_gives_other_traffic(tiny):
    other = generate(load_parameters(named_workloads()["tiny"]), seed=2)
    assert other.requests != tiny.requests
    assert checksum(other) != checksum(tiny)


@pytest.mark.parametrize(
    ("change", "same", "differs"),
    [
        ("agent.breaks.probability = 0.5", ("time_s", "session", "class_id"), "blocks"),
        ("chat.output_tokens.median = 900.0", ("time_s", "session", "class_id"), "input_tokens"),
        ("agent.reading_tokens.sigma = 0.5", ("time_s", "session", "class_id"), "input_tokens"),
        ("traffic.answers_stored = false", ("time_s", "session", "input_tokens", "asked_blocks"), "blocks"),
    ],
)
def test_a_changed_parameter_changes_only_what_it_is_about(tmp_path, tiny, change, same, differs):
    other = generate(parameters_of(tmp_path, change), seed=1)
    assert all(np.array_equal(getattr(tiny, name), getattr(other, name)) for name in same)
    assert not np.array_equal(getattr(tiny, differs), getattr(other, differs))
    untouched = CHATBOT if change.startswith("agent") else AGENT
    assert np.array_equal(
        tiny.input_tokens[tiny.class_id == untouched], other.input_tokens[other.class_id == untouched]
    )


def test_more_sessions_leave_those_that_were_there_as_they_were(tmp_path, tiny):
    more = generate(parameters_of(tmp_path, "[agent]\nsessions = 2800"), seed=1)
    ours, theirs = (set(zip(w.time_s.tolist(), w.input_tokens.tolist(), strict=True)) for w in (tiny, more))
    assert ours < theirs


def test_the_origin_lets_anyone_make_the_workload_again(tiny):
    path = named_workloads()["tiny"]
    assert tiny.origin["generator"] == tiny.name == "tiny"
    assert tiny.origin["seed"] == 1
    assert tiny.origin["parameters_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tiny.origin["parameters"]["traffic.scale"] == 0.02
    assert tiny.origin["parameters"]["agent.reading_tokens.median"] == 240.0
    assert tiny.origin["parameters"]["traffic.answers_stored"] is True


# Chains


ODD = {
    "tiny": "",
    "blocks of one token": "traffic = { block_tokens = 1, scale = 0.002 }",
    "contexts smaller than shared prompts": "agent.context_tokens = 100\nagent.long_context_tokens = 100\nchat.context_tokens = 9",
    "every prefix breaks": "agent.breaks.probability = 1.0\nchat.breaks.probability = 1.0",
    "prompts shorter than a block": "agent.prompt.tool_tokens.median = 1.0\nagent.prompt.system_tokens.median = 1.0",
    "history": "traffic.history_days = 60",
    "answers not stored": "traffic.answers_stored = false",
    "only chats": "agent.sessions = 0",
    "one day": "traffic = { days = 1, measured_from_days = 0, scale = 0.1 }",
}


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD.keys())
def test_block_ids_are_dense_and_each_block_has_one_parent(tmp_path, changes):
    workload = generate(parameters_of(tmp_path, changes), seed=3)
    parent = np.full(workload.unique_blocks, -2)
    for request in range(workload.requests):
        chain = workload.chain(request)
        before = np.concatenate(([-1], chain[:-1]))
        known = parent[chain]
        assert ((known == -2) | (known == before)).all(), f"request {request} has a block behind another parent"
        parent[chain] = before
    assert (parent > -2).all(), "an id that no request uses"
    assert np.array_equal(workload.asked_blocks, workload.input_tokens // workload.block_tokens), "full blocks only"
    is_answered = np.diff(workload.starts) > workload.asked_blocks
    assert is_answered.any() == ("answers_stored = false" not in changes)
    assert workload.time_s[0] >= 0


ANSWERS_OF_5 = """
traffic = { block_tokens = 1, scale = 0.01 }
agent = { breaks.probability = 0.0, output_tokens = { median = 5.5, sigma = 0.0 } }
chat = { breaks.probability = 0.0, output_tokens = { median = 5.5, sigma = 0.0 } }
"""


@pytest.mark.parametrize("class_id", [AGENT, CHATBOT])
def test_next_request_asks_for_the_answer_without_its_last_token(tmp_path, class_id):
    workload = generate(parameters_of(tmp_path, ANSWERS_OF_5), seed=1)
    assert set(np.diff(workload.starts) - workload.asked_blocks) == {4}
    unbroken = 0
    for request, before in zip(*previous_pairs(workload, class_id), strict=True):
        now, then = workload.asked(request), workload.chain(before)
        if len(now) <= len(then):
            continue  # compacted
        unbroken += 1
        assert np.array_equal(now[: len(then)], then)
    assert unbroken > 100


def test_sessions_share_tool_schemas_and_system_prompts_of_skewed_popularity(mixed):
    order = by_session(mixed)
    requests = order[np.unique(mixed.session[order], return_index=True)[1]]
    for class_id, least in ((AGENT, 0.05), (CHATBOT, 0.3)):
        roots = mixed.blocks[mixed.starts[requests[mixed.class_id[requests] == class_id]]]
        uses = np.sort(np.unique(roots, return_counts=True)[1])[::-1]
        assert len(uses) < len(roots), "none is shared"
        assert uses[0] / len(roots) > least
        assert uses[0] > 3 * uses[-1]


# The shape of the traffic; tolerances are wide enough for a fifth of the default's sessions


def test_agents_requests_and_gaps_have_the_measured_marginals(mixed):
    request, before = previous_pairs(mixed, AGENT)
    growth = mixed.input_tokens[request] - mixed.input_tokens[before]
    gaps = mixed.time_s[request] - mixed.time_s[before]
    tokens = mixed.input_tokens[mixed.class_id == AGENT]
    sittings = len(np.unique(mixed.session[mixed.class_id == AGENT])) + (gaps > 6 * 3600).sum()
    assert np.median(tokens) == pytest.approx(100_000, rel=0.2)
    assert tokens.mean() == pytest.approx(118_000, rel=0.25)
    assert np.median(growth) == pytest.approx(655, rel=0.1)
    assert growth[growth > 0].mean() == pytest.approx(1832, rel=0.15)
    assert np.median(gaps) == pytest.approx(17, rel=0.1)
    assert len(tokens) / sittings == pytest.approx(67, rel=0.25)


def test_agents_prefixes_break_as_often_as_measured(mixed):
    request, before = previous_pairs(mixed, AGENT)
    lost = np.array([_lost_blocks(mixed, *pair) for pair in zip(request, before, strict=True)])
    assert (lost > 0).mean() == pytest.approx(0.021, rel=0.2)
    assert (lost > 65_536 // mixed.block_tokens).mean() == pytest.approx(0.012, rel=0.3)


def _lost_blocks(workload, request, before):
    now, then = workload.chain(request), workload.chain(before)
    overlap = min(len(now), len(then))
    same = now[:overlap] == then[:overlap]
    return len(then) - (overlap if same.all() else int(np.argmin(same)))


def test_returns_have_a_heavy_tail_and_a_weekly_bump():
    returns = load_parameters(named_workloads()["mixed"]).returns
    uniforms = np.random.default_rng(1).random((60_000, 4))
    gaps = np.array([return_gap_s(returns, row) for row in uniforms])
    same_day = uniforms[:, 0] < returns.same_day_share
    later = gaps[~same_day]
    days = np.round(later / DAY_S)
    count = np.bincount(days.astype(int), minlength=61)
    assert days.max() == returns.max_days
    assert np.abs(later - days * DAY_S).max() <= 3 * 3600
    assert count[2] / count[1] == pytest.approx(2**-1.2, rel=0.1)
    assert count[10] / count[1] == pytest.approx(10**-1.2, rel=0.2)
    assert count[7] / np.sqrt(count[6] * count[8]) == pytest.approx(1.3, rel=0.15)
    assert count[8:].sum() / count.sum() == pytest.approx(0.33, abs=0.03)
    assert np.median(gaps[same_day]) == pytest.approx(5400, rel=0.1)


def test_conversations_begin_by_day_more_than_by_night():
    starts = load_parameters(named_workloads()["mixed"]).starts
    times = np.array([start_s(starts, -60, 42, row) for row in np.random.default_rng(1).random((40_000, 2))])
    by_hour = np.bincount((times % DAY_S // 3600).astype(int), minlength=24)
    assert -60 * DAY_S <= times.min() < -59 * DAY_S
    assert 41 * DAY_S < times.max() < 42 * DAY_S
    assert by_hour[14:16].sum() / by_hour[2:4].sum() == pytest.approx(4, rel=0.15)


def test_chat_has_a_third_of_the_tokens_and_both_classes_are_busiest_by_day(mixed):
    tokens = [mixed.input_tokens[mixed.measured & (mixed.class_id == one)].sum() for one in (AGENT, CHATBOT)]
    assert tokens[CHATBOT] / sum(tokens) == pytest.approx(0.3, abs=0.08)
    for class_id in (AGENT, CHATBOT):
        hour = mixed.time_s[mixed.class_id == class_id] % DAY_S / 3600
        assert ((hour > 11) & (hour < 19)).mean() > 1.5 * ((hour < 7) | (hour > 23)).mean()


def test_the_longest_ttl_fits_twice_into_the_warm_up(mixed):
    assert mixed.measured_from_s >= 2 * 7 * DAY_S
    assert mixed.time_s[-1] > 41 * DAY_S


def test_hit_rates_come_near_what_the_workload_is_calibrated_to(mixed):
    assert share_of_hits(mixed, AGENT, 300) == pytest.approx(0.916, abs=0.015)
    agent, chat_3d, chat_7d = (
        share_of_hits(mixed, *of) for of in ((AGENT, 3 * DAY_S), (CHATBOT, 3 * DAY_S), (CHATBOT, 7 * DAY_S))
    )
    # The measured trace hits 96.3 %, without its answers, which are another 0.3 %.
    assert agent == pytest.approx(0.966, abs=0.008)
    assert chat_7d == pytest.approx(0.927, abs=0.01)
    assert 0.005 <= 0.3 * (chat_7d - chat_3d) <= 0.01


# Files


def test_the_default_and_its_sensitivity_cases_are_found_by_name():
    known = named_workloads()
    assert {"mixed", "mixed-r2", "mixed-r3", "tiny"} <= known.keys()
    assert all(load_parameters(path).name == name for name, path in known.items())


def test_every_parameter_says_where_it_comes_from():
    for path in named_workloads().values():
        assigned = [
            line for line in path.read_text().splitlines() if re.match(r"[a-z_]+ *=", line) and "based_on" not in line
        ]
        bare = [line for line in assigned if not re.search(r"# (assumed|measured|quoted)", line)]
        assert not bare, f"{path.name}: {bare}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("[agent]\nsesions = 3", "line 3: agent.sesions: unknown key, did you mean sessions?"),
        ("[agnet]\nsessions = 3", "line 2: agnet: unknown key, did you mean agent?"),
        ("[chat]\n\ngap_s = { median = 3.0, sigm = 1.0 }", "line 4: chat.gap_s.sigm: unknown key, did you mean sigma?"),
        ("[chat.breaks]\nprobabilty = 0.1", "line 3: chat.breaks.probabilty: unknown key, did you mean probability?"),
        ('[traffic]\ndays = "42"', "line 3: traffic.days: Input should be a valid integer"),
        ("[traffic]\ndays = 42.5", "line 3: traffic.days: Input should be a valid integer"),
        ("[traffic]\ndays = true", "line 3: traffic.days: Input should be a valid integer"),
        ("[traffic]\nscale = nan", "line 3: traffic.scale: Input should be a finite number"),
        ("[traffic]\nscale = true", "line 3: traffic.scale: Input should be a valid number"),
        ("[traffic]\nscale = 0", "line 3: traffic.scale: Input should be greater than 0"),
        ("agent = 3", "line 2: agent: Input should be a valid dictionary"),
        (
            "[agent]\nresumed_share = 1.5",
            "line 3: agent.resumed_share: Input should be less than or equal to 1 (is 1.5)",
        ),
        (
            "[chat]\nuser_tokens = { median = -1.0 }",
            "line 3: chat.user_tokens.median: Input should be greater than 0 (is -1.0)",
        ),
        (
            "chat.habit.other_probability = 1",
            "line 2: chat.habit.other_probability: Input should be less than or equal to 0.99",
        ),
        ("[traffic]\nmeasured_from_days = 21", "line 2: traffic: measured_from_days (21) must be below days (21)"),
        (
            "[agent.breaks]\nprobability = 2.0\n[agent]\nsessions = 3",
            "line 3: agent.breaks.probability: Input should be less",
        ),
        ("agent.long_context_tokens = 9", "agent: long_context_tokens (9) is below context_tokens (170000)"),
        (
            "agent.breaks.behind_prompt_share = 0.9",
            "agent.breaks: from_start_share and behind_prompt_share are more than 1",
        ),
        ("traffic = { days =", "not a TOML file: "),
    ],
)
def test_a_wrong_parameter_is_refused_with_file_line_and_key(tmp_path, changes, message):
    with pytest.raises(WorkloadError, match=re.escape(message)) as caught:
        parameters_of(tmp_path, changes)
    assert str(tmp_path / "changed.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[traffic]\ndays = 42\n", "agent: is missing"),
        ("[traffic]\ndays = 42\n", "line 1: traffic.scale: is missing"),
        ('based_on = "mixd"\n', "based_on: 'mixd' is not one of mixed, mixed-r2, mixed-r3, tiny, did you mean mixed?"),
        ("based_on = 3\n", "based_on: 3 is not one of"),
        ("\xff", "not a TOML file"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(WorkloadError, match=re.escape(message)):
        load_parameters(path)


@pytest.mark.parametrize("path", ["", "absent.toml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, path):
    with pytest.raises(WorkloadError, match=re.escape(str(tmp_path / path))):
        load_parameters(tmp_path / path)


def test_traffic_of_nobody_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"changed: traffic.scale: leaves no agent.sessions"):
        generate(parameters_of(tmp_path, "traffic.scale = 0.000001"), seed=1)
    with pytest.raises(WorkloadError, match="seed -1 is negative"):
        generate(parameters_of(tmp_path), seed=-1)


def test_progress_rises_to_the_whole():
    told = []
    generate(load_parameters(named_workloads()["tiny"]), 1, told.append)
    assert told == sorted(told)
    assert told[0] == 0
    assert told[-1] == 1
    assert len(told) > 20
