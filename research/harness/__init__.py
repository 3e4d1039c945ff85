"""Papers: settings files of published experiments, run with the library, the published number beside ours."""
