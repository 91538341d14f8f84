#!/bin/sh
# The packages of one lock file into /opt/baton, byte code included, with times that do not tell when.
# Part of the Dockerfile.   install-locked LOCK [OPTION OF PIP]...
set -eu
lock=$1
shift
platform=linux/$(dpkg --print-architecture)
if ! grep -q "^# For .*$platform" "$lock"; then
    echo "$(basename "$lock") is not for $platform: run tools/lock_image_packages.py where torch for it can be had" >&2
    exit 1
fi
report=$(mktemp)
/opt/build/bin/pip --python /opt/baton/bin/python install --require-hashes --no-deps -r "$lock" --report "$report" "$@"
# Which of a lock's hashes each package came with, for the bill of materials.
/opt/build/bin/python - "$report" >/opt/baton/wheels.sha256 <<'END'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    installed = json.load(file)["install"]
lines = []
for package in installed:
    archive = package["download_info"]["archive_info"]
    # The older form is all that pip 23 tells of a file that came from a folder.
    digest = archive["hashes"]["sha256"] if archive.get("hashes") else archive["hash"].removeprefix("sha256=")
    lines.append("{}  {name}=={version}".format(digest, **package["metadata"]))
print("\n".join(sorted(lines)))
END
rm "$report"
# Our own code lies in a folder, and a layer, of its own.
for packages in /opt/baton/lib/python3*/site-packages; do
    echo /opt/app >"$packages/baton-app.pth"
    # The file names where pip found a package, which is no business of the image's.
    find "$packages" -path '*.dist-info/direct_url.json' -delete
    # Large, and never imported here: other packages' tests and C++ headers, a second Kubernetes client, kernels for
    # experts on many GPUs.
    rm -rf "$packages/torch/test" "$packages/torch/include" "$packages/kubernetes/aio" "$packages"/nixl_ep_cu*
    if [ -d "$packages/torch/bin" ]; then
        find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
    fi
done
# Some packages bring files of other Python versions, which do not compile and are never imported.
/opt/baton/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/baton/lib || true
find /opt/baton -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
