"""A client of ``featherbed serve``: rows, nearest rows and embeddings over HTTP.

featherbed serve words.safetensors &
python examples/http_client.py http://127.0.0.1:8000 words tea
"""

import io
import sys

import httpx
import numpy as np


def fetch_rows(client, name, keys):
    """Return rows [n, d] as numpy, sent as .npy bytes."""
    headers = {"accept": "application/x-npy"}
    answer = client.post(f"/{name}/rows", json={"keys": keys}, headers=headers)
    answer.raise_for_status()
    return np.load(io.BytesIO(answer.content))


def main(url, name, *keys):
    with httpx.Client(base_url=url) as client:
        rows = fetch_rows(client, name, list(keys))
        print(f"{rows.shape[0]} rows of {rows.shape[1]} numbers")
        for key in keys:
            near = client.post(f"/{name}/search", json={"key": key, "k": 5}).json()
            print(key, "is near", ", ".join(near["keys"]))
        body = {"model": name, "input": " ".join(keys)}
        mean = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        print("mean of the words:", [round(number, 3) for number in mean[:4]], "...")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
