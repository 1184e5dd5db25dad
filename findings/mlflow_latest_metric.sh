#!/usr/bin/env bash
# MLflow: after a resume, the latest metric of a run is a value that was discarded.
#
# Versions: mlflow-skinny 3.17.2
# Expected: A run that fails after step 3 and resumes from step 1 has the metric that it logged
#   last.
# Seen: "Latest" is the value of the highest step. Until the resumed run has passed the old step,
#   run.data.metrics, search_runs, and the table of the web page have the value from before the
#   failure. A run that ends earlier keeps it.
# Output:
#   logged: [(0, 0.9), (1, 0.8), (2, 0.7), (3, 0.05), (1, 0.82), (2, 0.73)]
#   run.data.metrics: 0.05
#   search_runs, metrics.loss < 0.1: 1 run
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(mlflow-skinny==3.17.2)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
export MLFLOW_ALLOW_FILE_STORE=true PYTHONWARNINGS=ignore
cat > check.py <<'PYTHON'
import os
import sys
import mlflow

mlflow.set_tracking_uri("file://" + os.path.abspath("runs"))
with mlflow.start_run() as run:
    for step, loss in ((0, 0.9), (1, 0.8), (2, 0.7), (3, 0.05)):
        mlflow.log_metric("loss", loss, step=step)
with mlflow.start_run(run_id=run.info.run_id):
    for step, loss in ((1, 0.82), (2, 0.73)):
        mlflow.log_metric("loss", loss, step=step)
client = mlflow.MlflowClient()
history = client.get_metric_history(run.info.run_id, "loss")
latest = client.get_run(run.info.run_id).data.metrics["loss"]
found = client.search_runs([run.info.experiment_id], "metrics.loss < 0.1")
print("logged:", [(metric.step, metric.value) for metric in history])
print("run.data.metrics:", latest)
print(f"search_runs, metrics.loss < 0.1: {len(found)} run")
if (latest, len(found)) != (0.05, 1):
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
