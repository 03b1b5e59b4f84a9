"""From records to spans, summaries and stories. Pure functions over records: the same for live and recorded data."""
