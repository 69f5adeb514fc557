"""How fast a dataset delivers, in the seeds' words: JSON text, to be loaded with `json`."""

import argparse
import json

import numpy as np

import tailrace as tr
from tailrace.compat import ipu


def main(epochs=10, elements=512):
    images = np.zeros((1024, 28, 28), np.float32)
    dataset = tr.batches((images, np.zeros(1024, np.int32)), 32, repeat=True)
    json_string = ipu.dataset_benchmark.dataset_benchmark(
        dataset, epochs, elements, print_stats=False
    )
    json_object = json.loads(json_string[0])
    rates = [epoch["elements_per_second"] for epoch in json_object["epochs"]]
    print(f"{len(rates)} epochs, {json_object['epochs'][0]['total_bytes_processed']:,} bytes each")
    return json_object


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--elements", type=int, default=512)
    main(**vars(parser.parse_args()))
