"""The dashboards, each in a module of its own."""

from __future__ import annotations

from dashboards.board import Board
from dashboards.boards.layer_groups import LAYER_GROUPS
from dashboards.boards.overview import OVERVIEW
from dashboards.boards.requests import REQUESTS
from dashboards.boards.store import STORE
from dashboards.boards.tracer import TRACER

BOARDS: list[Board] = [OVERVIEW, REQUESTS, LAYER_GROUPS, STORE, TRACER]
