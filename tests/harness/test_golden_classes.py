"""Golden j.*: which connector classes the runtime takes, and which form of a callback it reaches."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest

from tests.harness.recording import scenario
from tracekv.contract import KvCacheConnectorScheduler, KvCacheConnectorWorker
from tracekv.harness.manager import KvCacheConnectorManager
from tracekv.harness.requests import Request

FLAT = ("update_state_after_alloc", "request_finished")
GROUPED = ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group")
KNOWN = {*FLAT, *GROUPED, "register_kv_caches", "register_kv_cache_layout", "BAD_PAGE_INDEX"}

CLASSES = {
    "flat only": FLAT,
    "grouped only": GROUPED,
    "both": (*FLAT, *GROUPED),
    "grouped alloc + flat finish": (GROUPED[0], FLAT[1]),
    "flat alloc + grouped finish": (FLAT[0], GROUPED[1]),
    "flat + grouped alloc": (*FLAT, GROUPED[0]),
    "neither": (),
    "duck flat only": FLAT,
    "duck grouped only": GROUPED,
    "duck both": (*FLAT, *GROUPED),
    "duck neither": (),
}


def scheduler_class(methods, *, base=KvCacheConnectorScheduler, name="Sched"):
    def callback(method):
        def call(self, request, ids):
            self.seen.append([method, ids])
            return False if "finished" in method else None

        return call

    body = {
        "seen": property(lambda self: self.__dict__.setdefault("_seen", [])),
        "build_connector_meta": lambda self, output: None,
        "get_num_new_matched_tokens": lambda self, request, computed: (0, False),
    }
    return type(name, (base,), {**body, **{method: callback(method) for method in methods}})


def worker():
    names = (
        "register_kv_caches",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
    )
    return type("Worker", (KvCacheConnectorWorker,), {name: lambda self, *args: None for name in names})(None)


def names_in(message):
    return sorted(KNOWN & set(re.findall(r"\w+", message)))


def raised(error):
    message = str(error)
    fact = {"type": type(error).__name__, "first_words": " ".join(message.split()[:4])}
    if names_in(message):
        fact["names"] = names_in(message)
    if groups := re.search(r"has (\d+) layer groups", message):
        fact["groups"] = int(groups[1])
    return fact


def outcome(action):
    try:
        return {"ret": action()}
    except Exception as error:
        return {"raised": raised(error)}


def sorted_names(fact):
    if isinstance(fact, dict):
        return {key: sorted(value) if key == "names" else sorted_names(value) for key, value in fact.items()}
    return fact


def reached(scheduler, action):
    scheduler.seen.clear()
    result = outcome(action)
    return {"calls": list(scheduler.seen), **result}


def facts_of(methods, *, duck, caplog):
    cls = scheduler_class(methods, base=object if duck else KvCacheConnectorScheduler)
    facts = {
        "abstract": sorted(getattr(cls, "__abstractmethods__", ())),
        "injected stubs": sorted(name for name in FLAT if name in vars(cls) and name not in methods),
    }
    try:
        scheduler = cls() if duck else cls(None)
    except TypeError as error:
        return {**facts, "instantiate": raised(error)}
    manager = KvCacheConnectorManager(worker(), scheduler)
    facts["missing grouped"] = manager.missing_layer_group_forms()
    for groups in (0, 1, 2):
        facts[f"reject_flat_only_scheduler({groups})"] = outcome(lambda n=groups: manager.reject_flat_only_scheduler(n))
    caplog.clear()
    manager.warn_flat_scheduler_under_swa(64)
    facts["warn under one window"] = [
        [entry.levelname.lower(), " ".join(entry.getMessage().split()[:4]), names_in(entry.getMessage())]
        for entry in caplog.records
    ]
    caplog.clear()
    manager.warn_flat_scheduler_under_swa(None)
    facts["warn without window"] = len(caplog.records)
    request = Request(1, [1, 2, 3], 1)
    lists = {
        "V1 (flat [0,1])": ([0, 1], None),
        "V2 one group": ([0, 1], [[0, 1]]),
        "V2 two groups": ([], [[0, 1], [5, 6]]),
    }
    for verb in FLAT:
        for title, (flat, by_group) in lists.items():
            action = getattr(manager, verb)
            facts[f"{verb}: {title}"] = reached(scheduler, lambda a=action, f=flat, g=by_group: a(request, f, g))
    return facts


@pytest.mark.parametrize("title", CLASSES)
def test_a_scheduler_class_is_probed_and_called_as_the_real_manager_does(title, caplog):
    caplog.set_level(logging.INFO, "tracekv.harness")
    golden = scenario("j.scheduler_classes")["facts"]
    assert set(golden) == set(CLASSES)
    facts = facts_of(CLASSES[title], duck=title.startswith("duck"), caplog=caplog)
    assert sorted_names(facts) == sorted_names(golden[title])


@pytest.mark.parametrize("fact", scenario("j.dispatch")["facts"])
def test_a_non_empty_list_of_lists_selects_the_grouped_form(fact):
    verb, rest = fact.split(", grouped list ")
    given, forms = rest.split(", forms ")
    methods = (*FLAT, *GROUPED) if forms == "flat+grouped" else FLAT
    scheduler = scheduler_class(methods)(None)
    manager = KvCacheConnectorManager(worker(), scheduler)
    lists = {"omitted": [], "None": [None], "[]": [[]], "[[]]": [[[]]], "[[],[]]": [[[], []]], "[[0]]": [[[0]]]}[given]
    got = reached(scheduler, lambda: getattr(manager, verb)(Request(1, [1], 1), [7], *lists))
    golden = scenario("j.dispatch")["facts"][fact]
    assert {key: got[key] for key in got if key != "ret"} == golden


def test_the_probe_looks_at_the_type_along_its_inheritance():
    def missing(cls, instance_attribute=None):
        scheduler = cls(None)
        if instance_attribute:
            setattr(scheduler, instance_attribute, lambda *_: None)
        return KvCacheConnectorManager(worker(), scheduler).missing_layer_group_forms()

    flat, grouped = scheduler_class(FLAT, name="Flat"), scheduler_class(GROUPED, name="Grouped")
    mixin = type("Mixin", (), {name: lambda self, *_: None for name in GROUPED})

    def late_finish(self, request, ids):
        return False

    late_finish.__qualname__ = "LateFlat.request_finished"
    late = type("LateFlat", (grouped,), {"request_finished": late_finish})
    proxy = type("Proxy", (flat,), {"__getattr__": lambda self, name: None})
    subclass = type("Sub", (grouped,), {})
    facts = {
        "subclass of a grouped-only class: abstract": sorted(subclass.__abstractmethods__),
        "subclass of a grouped-only class: missing grouped": missing(subclass),
        "later flat override replaces the stub": late.request_finished.__qualname__,
        "mixin before the flat base: missing": missing(type("Before", (mixin, flat), {})),
        "mixin after the flat base: missing": missing(type("After", (flat, mixin), {})),
        "instance attribute with the grouped name: missing": missing(flat, GROUPED[0]),
        "__getattr__ proxy that inherits the base: missing": missing(proxy),
    }
    assert facts == scenario("j.inheritance")["facts"]


def test_worker_classes_fold_and_refuse_as_the_real_base_class_does():
    def of(name, *own, without_init=False):
        noted = {method: lambda self, value: self.__dict__.setdefault("got", value) for method in own}
        rest = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished")
        body = {**{method: lambda self, *_: None for method in rest}, **noted}
        if without_init:
            body["__init__"] = lambda self, args: None
        return type(name, (KvCacheConnectorWorker,), body)

    layout_only, tensor_only = of("LayOnly", "register_kv_cache_layout"), of("TensorOnly", "register_kv_caches")
    one_pool = SimpleNamespace(as_single_pool_tensor=lambda: "TENSOR", groups=[SimpleNamespace(regions=[1])])
    two_groups = SimpleNamespace(as_single_pool_tensor=lambda: None, groups=[SimpleNamespace(regions=[1, 2, 3])] * 2)
    folding = tensor_only(None)
    folding.register_kv_cache_layout(one_pool)
    plain = tensor_only(None)
    facts = {
        "layout only: abstract": sorted(layout_only.__abstractmethods__),
        "layout only: register_kv_caches called": outcome(lambda: layout_only(None).register_kv_caches(None)),
        "tensor only: layout with one pool reaches register_kv_caches with": folding.got,
        "tensor only: layout without a single tensor (2 groups, 3 regions each)": outcome(
            lambda: tensor_only(None).register_kv_cache_layout(two_groups)
        ),
        "neither": outcome(lambda: of("Neither")(None)),
        "register_forward_pass_callable default": plain.register_forward_pass_callable(),
        "metadata before the first bind": plain.get_connector_meta(),
        "supports_attention_dp default": [
            KvCacheConnectorScheduler.supports_attention_dp,
            KvCacheConnectorWorker.supports_attention_dp,
        ],
        "no super().__init__: get_connector_meta": outcome(
            lambda: of("N", "register_kv_caches", without_init=True)(None).get_connector_meta()
        ),
        **{f"has {name}": hasattr(plain, name) for name in ("shutdown", "cancel_load", "request_reset")},
    }
    assert sorted_names(facts) == sorted_names(scenario("j.worker_classes")["facts"])


def test_a_scheduler_belongs_to_rank_0_and_nowhere_else():
    rank_1 = SimpleNamespace(rank=1, world=2)
    for kwargs in ({"scheduler": None}, {"scheduler": object(), "collectives": rank_1}):
        with pytest.raises(AssertionError, match="A scheduler is required"):
            KvCacheConnectorManager(worker(), kwargs.pop("scheduler"), **kwargs)
    assert KvCacheConnectorManager(worker(), None, collectives=rank_1).scheduler is None
