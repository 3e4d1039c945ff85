"""The harness: settings, runs, records, summaries and reports of experiments."""
