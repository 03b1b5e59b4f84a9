from __future__ import annotations

import inspect

import pytest

import tracekv
from tests.support.connectors import FlatScheduler, GroupedScheduler, TensorWorker
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker

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
    from tracekv.journal.records import ConnectorWrapped

    scheduler = tracekv.trace(GroupedScheduler)(None)
    with pytest.raises(NotImplementedError, match="update_state_after_alloc_by_layer_group"):
        scheduler.update_state_after_alloc(None, [1])
    (wrapped,) = records(ConnectorWrapped)
    assert "update_state_after_alloc" in wrapped.not_implemented
    assert "update_state_after_alloc_by_layer_group" in [source.name for source in wrapped.implemented]


def test_an_inherited_callback_is_listed_as_not_implemented(records):
    from tracekv.journal.records import ConnectorWrapped

    tracekv.trace(TensorWorker)(None)
    (wrapped,) = records(ConnectorWrapped)
    assert wrapped.class_name.endswith("connectors.TensorWorker")
    assert set(wrapped.not_implemented) == {
        "register_forward_pass_callable",
        "register_kv_cache_layout",
        "bind_connector_meta",
    }


def test_where_a_callback_is_defined_is_recorded(records):
    from tracekv.journal.records import ConnectorWrapped

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
