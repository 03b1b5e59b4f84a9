"""Grafana dashboards as code, beside the rules, the provisioning and the compose file that use them.

``python -m dashboards`` writes ``dashboards/grafana/*.json`` and ``docs/dashboards.md``; both are committed, and a test holds them
equal to what this code makes. It needs a checkout and its extra ``dashboards``; whoever imports the JSON needs nothing of it.
"""
