from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import played
from tracekv.rules import RULES, Checker
from tracekv.rules.page import render
from tracekv.testing.corpus import CLEAN, FAULTS, LIMITS, verdict

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first_and_all_else_is_its_consequence(name):
    found = played.findings(name)
    assert [each.rule for each in found][:1] == [FAULTS[name].rule]
    assert verdict(FAULTS[name], found) == (True, [])
    assert found[0].evidence
    assert found[0].fix


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_raises_nothing(name):
    assert played.findings(name) == []
    assert len(played.records(name)) > 150


def test_every_rule_has_a_fault_but_for_the_one_that_no_record_can_prove():
    assert {rule.id for rule in RULES} - {fault.rule for fault in FAULTS.values()} == {"W8"}


def test_a_verdict_tells_a_missed_fault_and_what_is_named_falsely():
    fault = FAULTS["offers-the-whole-prompt-on-v2"]
    found = played.findings(fault.id)
    assert verdict(replace_rule(fault, "S5"), found) == (False, [each.rule for each in found])
    orphans = [replace(each, caused_by=None) for each in found]
    assert verdict(fault, orphans) == (True, ["N3", "N4", "W2"])
    assert verdict(fault, []) == (False, [])


def replace_rule(fault, rule):
    return fault._replace(rule=rule)


@pytest.mark.parametrize("name", CLEAN)
def test_a_journal_with_gaps_raises_nothing(name):
    records = played.records(name)
    for seed in range(25):
        chance = random.Random(seed)
        gone = set()
        for _ in range(chance.randint(1, 3)):
            first = chance.randrange(len(records))
            gone.update(range(first, first + chance.choice([1, 2, 5, 20, 100])))
        checker = Checker(limits=LIMITS)
        numbers = Counter()
        for place, (source, record) in enumerate(records):
            if place not in gone:
                checker.feed(source, record, numbers[source])
            numbers[source] += 1
        checker.close()
        assert checker.findings == [], f"seed {seed}"
        assert not checker.removed


def test_gaps_that_nobody_tells_of_would_be_taken_for_faults():
    # The negative control of the test above: the same records, without numbers, as if nothing were missing.
    records = played.records("one-group-chunked")
    named = 0
    for seed in range(25):
        first = random.Random(seed).randrange(len(records))
        checker = Checker(limits=LIMITS)
        for source, record in records[:first] + records[first + 3 :]:
            checker.feed(source, record)
        checker.close()
        named += len(checker.findings)
    assert named > 0


def test_the_page_of_rules_is_what_the_classes_and_the_corpus_say():
    clean = {name: [found.rule for found in played.findings(name)] for name in CLEAN}
    assert PAGE.read_text() == render(played.verdicts(), clean)
