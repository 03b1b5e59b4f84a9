from __future__ import annotations

import hashlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KEY_BYTES, Deployment, KeyChain, UnkeyableTokens, namespace_digest, tenant_digest
from tracekv_fsspec.paths import commit_of, manifest_path, new_writer, segment_path

text = st.text(max_size=8)
maybe = st.none() | text
deployments = st.builds(
    Deployment,
    model_id=text,
    dtype=text,
    tokens_per_block=st.integers(1, 64),
    layout=st.binary(max_size=4),
    world=st.integers(1, 4),
    kv_scales=maybe,
)
extras = st.fixed_dictionaries({"cache_salt": maybe, "multimodal": maybe, "lora": maybe})
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=24)


def keys_of(deployment, extra, ids, block=4):
    chain = KeyChain(namespace_digest(deployment.digest(), **extra), block)
    chain.extend(ids)
    return chain.keys


@given(deployments, extras, tokens)
def test_the_same_request_always_has_the_same_keys(deployment, extra, ids):
    again = msgspec.json.decode(msgspec.json.encode(deployment), type=Deployment)
    assert keys_of(deployment, extra, ids) == keys_of(again, dict(extra), list(ids))


@given(deployments, deployments, extras, extras, tokens)
def test_requests_that_differ_in_anything_but_tokens_share_no_key(one, other, extra, other_extra, ids):
    shared = set(keys_of(one, extra, ids)) & set(keys_of(other, other_extra, ids))
    assert bool(shared) == ((one, extra) == (other, other_extra))


@given(deployments, extras, tokens, st.data())
def test_a_changed_token_changes_its_block_and_every_later_one(deployment, extra, ids, data):
    position = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids]
    changed[position] ^= 1
    before, after = keys_of(deployment, extra, ids), keys_of(deployment, extra, changed)
    block = position // 4
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.lists(st.integers(1, 9), max_size=20))
def test_a_chain_grown_piece_by_piece_is_the_chain_of_the_whole(ids, pieces):
    chain, whole, at = KeyChain(bytes(32), 4), KeyChain(bytes(32), 4), 0
    for piece in pieces:
        chain.extend(ids[at : at + piece])
        at += piece
    whole.extend(ids[:at])
    assert chain.keys == whole.keys
    assert chain.tokens == len(ids[:at])


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_a_chain_grown_token_by_token_is_the_chain_of_the_whole(ids):
    chain, whole = KeyChain(bytes(32), 4), KeyChain(bytes(32), 4)
    for known, token in enumerate(ids, 1):
        assert chain.append(token) == bool(known % 4)
        if not known % 4:
            chain.extend([token])
    whole.extend(ids)
    assert (chain.keys, chain.tail) == (whole.keys, whole.tail)


def test_a_key_is_the_chained_sha256_of_little_endian_tokens():
    namespace = namespace_digest(bytes(32), cache_salt="s")
    chain = KeyChain(namespace, 2)
    chain.extend([1, 2, 3, 2**32 - 1, 5])
    first = hashlib.sha256(namespace + struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**32 - 1)).digest()
    assert chain.keys == [first[:KEY_BYTES], second[:KEY_BYTES]]


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_a_token_that_is_no_uint32_has_no_key_and_leaves_the_chain_as_it_was(bad):
    chain = KeyChain(bytes(32), 2)
    chain.extend([1, 2, 3])
    with pytest.raises(UnkeyableTokens):
        chain.extend([4, bad])
    chain.extend([4])
    with pytest.raises(UnkeyableTokens):
        chain.append(bad)
    whole = KeyChain(bytes(32), 2)
    whole.extend([1, 2, 3, 4])
    assert chain.keys == whole.keys


def test_none_is_another_salt_than_any_text():
    digests = {namespace_digest(bytes(32), cache_salt=salt) for salt in (None, "", "-", "None", "0")}
    assert len(digests) == 5


@given(
    st.lists(
        st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 10**6), st.integers(0, 999)),
        min_size=2,
        unique=True,
    )
)
def test_deployment_sequence_and_rank_never_share_an_object(places):
    writer = new_writer()
    paths = [segment_path(deployment, writer, sequence, rank) for deployment, sequence, rank in places]
    assert len(set(paths)) == len(places)


@given(st.lists(st.integers(0, 10**11), min_size=2, unique=True))
def test_manifests_list_in_the_order_of_writing(sequences):
    writer = new_writer()
    paths = [manifest_path(bytes(32), writer, sequence) for sequence in sorted(sequences)]
    assert paths == sorted(paths)
    assert [commit_of(path) for path in paths] == [((writer, sequence), False) for sequence in sorted(sequences)]
    assert [commit_of(path.replace(".man", ".tmb")) for path in paths] == [
        ((writer, s), True) for s in sorted(sequences)
    ]


def test_writers_never_share_an_id():
    assert len({new_writer() for _ in range(1000)}) == 1000


def test_layer_group_and_rank_are_two_different_parts_of_a_place():
    assert Shard(0, 1) != Shard(1, 0)


def test_all_namespaces_of_a_salt_begin_alike_and_no_others_do():
    deployment = bytes(32)
    own = {
        namespace_digest(deployment, cache_salt="s", lora=lora, multimodal=m)
        for lora in (None, "a")
        for m in (None, "b")
    }
    assert len(own) == 4
    assert {namespace[:16] for namespace in own} == {tenant_digest(deployment, "s")}
    others = {tenant_digest(deployment, None), tenant_digest(deployment, ""), tenant_digest(b"e" * 32, "s")}
    assert len(others | {tenant_digest(deployment, "s")}) == 4
