"""Coded payloads in a collective: bitwise the gathered mean, on the rung that the content needs, for its bytes."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile import same
from jax.sharding import PartitionSpec as P
from messages import examples
from worlds import AXIS, mesh_of, run_pmap, run_shard_map, run_vmap

import jaxcomp as jc
from jaxcomp.exchange.routes.ladder import rungs
from jaxcomp.packing import pack
from jaxcomp.payloads import Dense, Quantized, Sparse, decode_message, encode_message, local_indices
from jaxcomp.wire.limits import PAD_BYTES

N = 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    ["dense", "scaled", "local", "levels-wide"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("sparse-bf16", "sparse-full", "leaves", "nested")],
)
def test_payloads_survive_as_words(name):
    payload = jax.tree.map(jnp.asarray, examples()[name][0])
    message = jax.jit(encode_message)(payload)
    assert message.fits
    assert not np.any(message.words[message.used :])
    assert same(jax.jit(lambda words: decode_message(words, payload))(message.words), payload)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("count", [0, 1, 50, 51, 400])
def test_values_in_16_bits_are_as_many_as_indices(count, local):
    """Padding has no words, in a `Dense` of narrow values either; a value that stands there is kept."""
    there = np.arange(400) < count
    indices = jnp.asarray(np.where(there, 7 * np.arange(400), 3000), jnp.int32)
    indices = local_indices(indices, 3000) if local else indices
    for spoiled in (False, True):
        values = jnp.asarray(np.where(there, 1.5, 0), jnp.bfloat16).at[-1].add(float(spoiled))
        payload = Sparse(Dense(values), indices)
        message = jax.jit(encode_message)(payload)
        back = jax.jit(decode_message)(message.words, payload)
        assert not message.fits or same(back, payload)
        if not spoiled or count == 400:
            assert message.fits
            assert message.used <= 16 + count * 7 // 8  # 16 bits and a key of some more


@pytest.mark.slow
def test_levels_of_every_density(seed):
    """One program codes and decodes them; the size follows the content."""
    rng = np.random.default_rng(seed)
    size = 3200

    @jax.jit
    def there_and_back(payload):
        message = encode_message(payload)
        return decode_message(message.words, payload), message.used, message.fits

    used = []
    for density in (0, 0.003, 0.1, 0.9, 1):
        levels = jnp.asarray(np.where(rng.random(size) < density, rng.integers(1, 8, size), 0).astype(np.uint32))
        payload = Quantized(jnp.ones(3), pack(levels, 3))
        back, words, fits = there_and_back(payload)
        assert fits
        assert same(back, payload)
        # Whole words for each part, and what stands before them; the wire has bytes and a frame,
        # and fills up a short message that stands for a long array.
        spare = 64 + jc.lane_bytes(payload) // PAD_BYTES
        assert abs(4 * int(words) - len(jc.wire.encode(payload, code="best"))) < spare
        used.append(int(words))
    assert used[:4] == sorted(set(used[:4]))
    assert used[0] <= 10
    assert used[3] > used[4]  # without zeros there is one level less to tell apart


def test_what_no_code_can_hold_is_reported():
    far = Sparse(jnp.ones(3), jnp.array([5, 4, 9]))
    after = Sparse(jnp.ones(3), jnp.array([5, 9, 9]))
    encode = jax.jit(encode_message)
    for payload in (far, after):
        assert not encode(payload).fits
    assert encode(Sparse(jnp.ones(3), jnp.array([4, 5, 9]))).fits


@pytest.mark.slow
def test_local_indices_that_are_not_canonical_are_reported():
    local = Sparse(jnp.array([1.0, 1, 0]), local_indices(jnp.array([5, 6, 9]), 9))
    encode = jax.jit(encode_message)
    assert encode(local).fits
    assert not encode(local._replace(indices=local.indices._replace(counts=jnp.array([1])))).fits


PARAMS = {"b": jnp.zeros(5), "v": jnp.zeros(3001)}
COMPRESSORS = {
    "top_k": jc.flat(jc.top_k(0.05)),
    "narrow": jc.flat(jc.narrow(jc.sidco(0.05), values="bfloat16", indices="uint16")),
    "nested": jc.flat(jc.compose(jc.top_k(0.05), jc.dithering(7))),
    "levels": jc.flat(jc.dithering(1, norm="inf")),  # norms without sums, whose order worlds may choose
    "leaves": jc.per_leaf(jc.top_k(0.05), dense_below=10),
    "raw": jc.flat(jc.identity()),
}


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPRESSORS)
def test_bitwise_the_mean_of_gather(name, seed):
    """For every kind of payload, in every world."""
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal((1, N, *p.shape)), p.dtype), PARAMS)
    algorithm = jc.direct(COMPRESSORS[name])
    with jax.numpy_dtype_promotion("standard"):
        coded = jc.compressed_mean(algorithm, AXIS, via="ladder")
        want, gathered = run_shard_map(jc.compressed_mean(algorithm, AXIS, via="gather"), PARAMS, grads)
        got, state = run_shard_map(coded, PARAMS, grads)
        assert bits(got) == bits(want)
        assert bits(run_vmap(coded, PARAMS, grads)[0]) == bits(want)
        assert bits(run_pmap(coded, PARAMS, grads)[0]) == bits(want)
    less = float(jc.info(state).sent_bytes) / float(jc.info(gathered).sent_bytes)
    assert 1 < less < 1.01 if name == "raw" else less < 0.85


@pytest.mark.slow
def test_rungs_follow_the_content_without_compiling_again(seed):
    """Bitwise the mean of gathering on every rung, in one program for several workers; the ledger lists the rungs."""
    rng, size = np.random.default_rng(seed), 2000
    algorithm, like = jc.direct(jc.contrib.hard_threshold(1.0, room=1.0)), jnp.zeros(size)
    mesh, traces, directions, sent = mesh_of(N), [], {}, []

    def run(via):
        tx = jc.compressed_mean(algorithm, AXIS, via=via)
        state, specs = jc.init_state(tx, like, mesh, AXIS)

        def step(state, grads):
            traces.append(via)
            return tx.update(grads[0], state)

        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=(P(), specs)))
        step = step.lower(state, rounds[0]).compile()
        directions[via] = []
        for grads in rounds:
            direction, state = jax.block_until_ready(step(state, grads))
            directions[via].append(bits(direction))
            sent.append(float(jc.info(state).sent_bytes))
        return jc.info(state), jc.ledger(step)

    rounds = [jnp.asarray(x * rng.standard_normal((N, size)), jnp.float32) for x in (0.4, 0.6, 0.9, 3)]
    with jax.numpy_dtype_promotion("standard"):
        run("gather")
        sent.clear()
        info, table = run("ladder")
    assert directions["ladder"] == directions["gather"]
    assert traces.count("ladder") == 1
    assert info.chosen == "ladder"
    steps = [4 * step for step in (*rungs(2 * size), 2 * size)]
    assert all(any(each == pytest.approx((N - 1) * step + 8 * (N - 1) / N) for step in steps) for each in sent)
    assert sent == sorted(set(sent))
    # The compiled program has one gather for each rung, each in a branch of its own, and agrees on one word.
    gathers = [row for row in table.rows if row.op == "all-gather"]
    assert sorted(row.operand_bytes for row in gathers) == steps
    assert len({row.branch for row in gathers}) == len(gathers)
    assert all(row.branch for row in gathers)
    (agreed,) = [row for row in table.rows if row.op == "all-reduce"]
    assert table.total_bytes == (N - 1) * steps[-1] + agreed.sent_bytes


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="needs Linux's counters")
@pytest.mark.slow
def test_the_loopback_device_carries_what_is_accounted():
    """Three processes joined by gloo, alone in a network namespace where the system lets us make one."""
    worker = Path(__file__).with_name("ladder_worker.py")
    inside = ["unshare", "--user", "--map-root-user", "--net"]
    allowed = subprocess.run([*inside, "true"], capture_output=True).returncode == 0
    command = [*(inside if allowed else []), sys.executable, str(worker)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 4
    for row in rows:
        assert row["bytes"] == pytest.approx(row["accounted"], rel=0.03), rows
    assert [row["via"] for row in rows] == ["gather", "ladder", "ladder", "ladder"]
    accounted = [row["accounted"] for row in rows]
    assert accounted == sorted(accounted, reverse=True)
