"""Generate the gRPC stubs beside their `.proto` files; `--check` compares instead and names what is
stale.

Run from anywhere. Needs grpcio-tools 1.66.2, in an environment of its own (`make protos` sees to
that): stubs of newer generators refuse older protobuf runtimes, which other packages in an image
may hold us to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> list[Path]:
    """Write the stubs of every `.proto` under `protos/` into `out`. Returns: their paths relative
    to `out`."""
    from grpc_tools import protoc  # a generator-only dependency, absent at run time

    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    flags = [f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *flags, *protos]) != 0:
        raise SystemExit("protoc failed")
    return sorted(path.relative_to(out) for path in (out / "protos").glob("*_pb2*"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit 1 naming stale stubs instead of writing them"
    )
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
        stale = [
            str(path)
            for path in fresh
            if not (ROOT / path).is_file()
            or (ROOT / path).read_bytes() != (Path(scratch) / path).read_bytes()
        ]
    if stale:
        sys.stderr.write(f"stale stubs, run `make protos`: {', '.join(stale)}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
