"""Make a GPU's calibration table from a run of `fp8patch bench --gemm --json gemm.json` on it.

python scripts/calibrate_gpu.py gemm.json fp8patch/calibration/h200.json
"""

import argparse
import json
from pathlib import Path

from fp8patch.bench.fit import fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("table", type=Path)
    options = parser.parse_args()
    table = fit(json.loads(options.measured.read_text()))
    options.table.parent.mkdir(exist_ok=True)
    options.table.write_text(json.dumps(table, indent=1) + "\n")
    print("M x N x K                BF16 us  predicted   FP8 us  predicted     gain  predicted")
    for line in table["shapes"]:
        shape = f"{line['m']} x {line['n']} x {line['k']}"
        gain = line["bf16_us"] / line["fp8_us"]
        predicted = line["bf16_predicted_us"] / line["fp8_predicted_us"]
        print(
            f"{shape:22} {line['bf16_us']:9.1f} {line['bf16_predicted_us']:10.1f}"
            f"{line['fp8_us']:9.1f} {line['fp8_predicted_us']:10.1f} {gain:8.2f} {predicted:10.2f}"
        )


if __name__ == "__main__":
    main()
