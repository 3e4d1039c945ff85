"""Click models over collections of compact tables, at equal bytes."""

from research.harness.report import markdown, mean_text, records_of

STUDIES = {"generated": "clicks/generated", "criteo": "clicks/criteo"}


def blocks() -> dict[str, list[str]]:
    """Return the tables of the README."""
    return {name: _table(study) for name, study in STUDIES.items()}


def _table(study: str) -> list[str]:
    rows = []
    for name, records in records_of(study).items():
        measures = [record["measures"] for record in records]
        bytes_, ratio = (
            sum(m[key] for m in measures) / len(measures) for key in ("bytes", "ratio")
        )
        model, _, method = name.partition("-")
        cells = [mean_text([m[key] for m in measures], 4) for key in ("auc", "log_loss")]
        method = method.replace("-", " ").replace("quotient remainder", "quotient-remainder")
        rows.append((model, method, *cells, f"{bytes_ / 1000:,.1f}", f"{ratio:.1f}"))
    head = ["model", "tables", "test AUC", "test log loss", "file (KB)", "times fewer bytes"]
    return markdown(head, rows)
