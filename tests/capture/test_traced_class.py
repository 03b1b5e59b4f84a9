from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import tracekv
from tests.support.connectors import FlatScheduler, GroupedScheduler, TensorWorker
from tracekv.capture import classes
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tracekv.journal.records import Call, ConnectorWrapped, FinishCall, RunJoined, TracerFault
from tracekv.journal.vocabulary import Callback

PROBED = [
    (KvCacheConnectorScheduler, "update_state_after_alloc_by_layer_group"),
    (KvCacheConnectorScheduler, "request_finished_by_layer_group"),
    (KvCacheConnectorScheduler, "wait_for_initialization"),
    (KvCacheConnectorWorker, "register_kv_cache_layout"),
    (KvCacheConnectorWorker, "register_forward_pass_callable"),
]


class BothForms(FlatScheduler):
    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
        pass

    def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
        return False


class LayoutWorker(TensorWorker):
    supports_attention_dp = True

    def register_kv_cache_layout(self, layout):
        pass

    def register_forward_pass_callable(self):
        return lambda: None


class Duck:
    def __init__(self, llm_args):
        self.args = llm_args

    def build_connector_meta(self, scheduler_output):
        return b"duck"


@pytest.mark.parametrize("inner", [FlatScheduler, GroupedScheduler, BothForms, TensorWorker, LayoutWorker, Duck])
def test_bring_up_probes_answer_as_for_the_bare_class(inner):
    traced = tracekv.trace(inner)
    for base, name in PROBED:
        bare_answer = getattr(inner, name, None) is getattr(base, name)
        assert (getattr(traced, name, None) is getattr(base, name)) is bare_answer, name
        assert hasattr(traced, name) is hasattr(inner, name), name
    assert getattr(traced, "supports_attention_dp", "absent") is getattr(inner, "supports_attention_dp", "absent")
    assert getattr(traced, "__abstractmethods__", None) == getattr(inner, "__abstractmethods__", None)


def test_a_class_attribute_that_is_only_truthy_stays_only_truthy():
    class Sloppy(TensorWorker):
        supports_attention_dp = 1

    assert type(tracekv.trace(Sloppy)(None)).supports_attention_dp is not True


def test_an_incomplete_class_stays_abstract():
    class Incomplete(KvCacheConnectorWorker):
        def start_load_kv(self, stream):
            pass

    with pytest.raises(TypeError, match="abstract"):
        tracekv.trace(Incomplete)(None)


def test_an_injected_stub_still_raises_and_is_not_called_implemented(records):
    scheduler = tracekv.trace(GroupedScheduler)(None)
    with pytest.raises(NotImplementedError, match="update_state_after_alloc_by_layer_group"):
        scheduler.update_state_after_alloc(None, [1])
    (wrapped,) = records(ConnectorWrapped)
    assert "update_state_after_alloc" in wrapped.not_implemented
    assert "update_state_after_alloc_by_layer_group" in [source.name for source in wrapped.implemented]


def test_an_inherited_callback_is_listed_as_not_implemented(records):
    tracekv.trace(TensorWorker)(None)
    (wrapped,) = records(ConnectorWrapped)
    assert wrapped.class_name.endswith("connectors.TensorWorker")
    assert set(wrapped.not_implemented) == {
        "register_forward_pass_callable",
        "register_kv_cache_layout",
        "bind_connector_meta",
    }


def test_where_a_callback_is_defined_is_recorded(records):
    tracekv.trace(TensorWorker)(None)
    (wrapped,) = records(ConnectorWrapped)
    (start_load,) = [source for source in wrapped.implemented if source.name == "start_load_kv"]
    assert start_load.file == inspect.getsourcefile(TensorWorker)
    assert start_load.line == inspect.getsourcelines(TensorWorker.start_load_kv)[1]


def test_a_method_from_a_mixin_counts_as_overridden():
    class Mixin:
        def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
            return False

    class Mixed(Mixin, FlatScheduler):
        pass

    assert tracekv.trace(Mixed).request_finished_by_layer_group is not (
        KvCacheConnectorScheduler.request_finished_by_layer_group
    )


def test_the_traced_class_looks_like_the_inner_one():
    traced = tracekv.trace(FlatScheduler)
    assert issubclass(traced, FlatScheduler)
    assert (traced.__name__, traced.__module__, traced.__doc__) == (
        FlatScheduler.__name__,
        FlatScheduler.__module__,
        FlatScheduler.__doc__,
    )
    assert inspect.signature(traced.get_num_new_matched_tokens) == inspect.signature(
        FlatScheduler.get_num_new_matched_tokens
    )


def test_nothing_is_added_to_the_instance():
    assert vars(tracekv.trace(TensorWorker)(None)) == vars(TensorWorker(None))


def test_tracing_twice_gives_the_same_class():
    traced = tracekv.trace(FlatScheduler)
    assert tracekv.trace(FlatScheduler) is traced
    assert tracekv.trace(traced) is traced


def test_threads_that_trace_a_class_at_once_get_the_same_one(monkeypatch):
    class Connector(TensorWorker):
        pass

    both, build = threading.Barrier(2), classes._build

    def building(inner):
        both.wait(30)
        return build(inner)

    monkeypatch.setattr(classes, "_build", building)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(tracekv.trace, (Connector, Connector))
    assert first is second


def test_a_class_that_nobody_has_any_more_is_gone_with_its_traced_one():
    def made():
        class Connector(TensorWorker):
            pass

        tracekv.trace(Connector)(None)
        return weakref.ref(Connector)

    gone = made()
    gc.collect()
    assert gone() is None


def test_it_works_as_a_decorator():
    @tracekv.trace
    class Decorated(TensorWorker):
        def __init__(self, llm_args=None):
            super().__init__(llm_args)
            self.ready = True

    assert Decorated().ready


def test_unknown_methods_attributes_and_static_methods_pass_through():
    class Rich(TensorWorker):
        extra = 5

        @staticmethod
        def helper():
            return "helped"

        @staticmethod
        def start_load_kv(stream):
            return f"static {stream}"

    worker = tracekv.trace(Rich)(None)
    worker.colour = "blue"
    assert (worker.extra, worker.helper(), worker.colour) == (5, "helped", "blue")
    assert worker.start_load_kv("s") == "static s"


def test_keyword_arguments_by_the_contracts_names_work():
    scheduler = tracekv.trace(FlatScheduler)(llm_args=None)
    assert scheduler.request_finished(request=_any_request(), cache_block_ids=[1]) is False


def test_a_class_that_is_no_connector_is_refused_by_name():
    with pytest.raises(TypeError, match=r"dict has neither build_connector_meta nor start_load_kv"):
        tracekv.trace(dict)


def _any_request():
    from tests.support.connectors import request

    return request()


def test_what_a_callback_takes_beyond_the_contract_it_takes_traced_too(records):
    class Taking(TensorWorker):
        def start_load_kv(self, stream=None, *, limit=0):
            return stream, limit

        def wait_for_layer_load(self, layer_idx, stream, timeout=None):
            return layer_idx, timeout

        def bind_connector_meta(self, metadata, *more):
            super().bind_connector_meta(metadata)
            return more

        def get_finished(self, finished_gen_req_ids, started_loading_req_ids, **named):
            return [], sorted(named)

    worker = tracekv.trace(Taking)(None)
    assert worker.start_load_kv() == (None, 0)
    assert worker.start_load_kv("s", limit=3) == ("s", 3)
    assert worker.wait_for_layer_load(2, None, 5) == (2, 5)
    assert worker.bind_connector_meta("plan", 1, 2) == (1, 2)
    assert worker.get_connector_meta() == "plan"
    assert worker.get_finished([], [], block=True) == ([], ["block"])
    with pytest.raises(TypeError):
        worker.wait_for_save(None, 1)
    assert [record.callback for record in records(Call)].count(Callback.START_LOAD_KV) == 2


def test_a_subclass_that_leaves_out_the_constructor_works_and_records_nothing(records):
    class Further(tracekv.trace(TensorWorker)):
        def __init__(self, llm_args):
            self.own = llm_args

    tracekv.trace(TensorWorker)(None)
    before = len(records())
    assert Further(3).start_load_kv(None) is None
    assert len(records()) == before


def test_a_subclass_of_a_traced_class_is_traced_as_one_connector(records):
    class Further(tracekv.trace(FlatScheduler)):
        def request_finished(self, request, cache_block_ids):
            return super().request_finished(request, cache_block_ids)

    scheduler = tracekv.trace(Further)(None)
    scheduler.request_finished(_any_request(), [1])
    (wrapped,) = records(ConnectorWrapped)
    assert wrapped.class_name.endswith("Further")
    assert len(records(RunJoined)) == len(records(FinishCall)) == 1
    assert tracekv.trace(Further)._tracekv_recorder is tracekv.trace(FlatScheduler)._tracekv_recorder


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_an_instance_can_be_copied_as_a_bare_one(copied, monkeypatch):
    monkeypatch.setattr(sys.modules[TensorWorker.__module__], "TensorWorker", tracekv.trace(TensorWorker))
    worker = tracekv.trace(TensorWorker)(None)
    worker.held = [1]
    again = copied(worker)
    assert again.held == [1]
    assert again.start_load_kv(None) is None


def test_a_class_that_watches_its_attributes_is_traced():
    class Watching(TensorWorker):
        def __init__(self, llm_args):
            object.__setattr__(self, "names", [])
            self.ready = True

        def __setattr__(self, name, value):
            self.names.append(name)
            object.__setattr__(self, name, value)

    assert tracekv.trace(Watching)(None).names == ["ready"]


def test_a_class_with_nothing_but_slots_is_traced(records):
    class Slotted:
        __slots__ = ("args",)

        def __init__(self, llm_args):
            self.args = llm_args

        def start_load_kv(self, stream):
            return self.args

    assert tracekv.trace(Slotted)(5).start_load_kv(None) == 5
    assert records(TracerFault) == []


def test_a_traced_class_is_constructed_by_the_arguments_of_its_inner_one():
    class Made(TensorWorker):
        def __new__(cls, llm_args, extra):
            made = super().__new__(cls)
            made.extra = extra
            return made

        def __init__(self, llm_args, extra):
            super().__init__(llm_args)

    assert tracekv.trace(Made)(None, extra=4).extra == 4
    for inner in (TensorWorker, FlatScheduler, Made, Duck):
        assert inspect.signature(tracekv.trace(inner)) == inspect.signature(inner)
