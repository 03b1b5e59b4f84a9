"""The contract as rules over records: which was broken, by which side, at which callback, for which request, and what to do.

Pure functions of records: they run live in the agent and offline over a journal, and never raise into anything.
"""

from __future__ import annotations

from tracekv.rules.catalogue import RULES
from tracekv.rules.checker import Checker, RuleView
from tracekv.rules.model import By, Evidence, Finding, Limits, Rule, Severity

__all__ = ["RULES", "By", "Checker", "Evidence", "Finding", "Limits", "Rule", "RuleView", "Severity"]
