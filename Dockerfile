# Baton's images. `make images` builds all three:
#
#   control      router, store (shared memory, gRPC), autoscaler, the `baton` command. No torch.
#   worker-cpu   prefill and decode on CPU, the store with NIXL. torch without CUDA.
#   worker-cuda  the same on NVIDIA GPUs. CUDA's libraries come with torch; the driver from the node.
#
# Run as uid 65532, nothing in it writable by it; all that a process writes goes below /tmp (HOME, caches) or to
# /dev/shm (the slab). An argument is a module: `docker run IMAGE services.router --set ...`.
#
# Reproducible: base image by digest, Debian packages of one day, Python packages by hash (images/*.lock), no caches,
# byte code bound to its source's contents, not to its time. Same SOURCE_DATE_EPOCH, same files.
#
# What is in an image stands in it: /opt/app/sbom.cdx.json (CycloneDX), made by tools/gen_sbom.py as its last step.

# Debian 12 has the Python that everything here is tested with.
ARG BASE_IMAGE=debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
# Whether Debian's packages are of the base image's day, which it names itself. Empty: today's, from its mirror.
ARG DEBIAN_OF_BASE_DAY=yes
# Time of every file that a build makes, in seconds since 1970.
ARG SOURCE_DATE_EPOCH=0
ARG VERSION=0.1.0

# ---- base: Python, certificates, the user -----------------------------------------------------------------------
FROM ${BASE_IMAGE} AS base
ARG DEBIAN_OF_BASE_DAY
COPY images/install_packages.sh /usr/local/bin/install-packages
RUN install-packages ca-certificates python3 \
    && echo 'baton:x:65532:65532:baton:/tmp:/usr/sbin/nologin' >>/etc/passwd \
    && echo 'baton:x:65532:' >>/etc/group
ENV PATH=/opt/app/bin:/opt/baton/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

# ---- builder: pip, in an environment of its own, which no image gets ----------------------------------------------
FROM base AS builder
ARG DEBIAN_OF_BASE_DAY
ARG SOURCE_DATE_EPOCH
ARG PIP_FIND_LINKS=
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_FIND_LINKS=${PIP_FIND_LINKS}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1 PIP_ONLY_BINARY=:all: PIP_REQUIRE_VIRTUALENV=1
RUN install-packages python3-venv
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/baton
COPY images/install_locked.sh /usr/local/bin/install-locked

FROM builder AS control-packages
COPY images/control.lock /tmp/
RUN install-locked /tmp/control.lock

FROM builder AS worker-cpu-packages
# Where torch without CUDA comes from: the CPU index that PyTorch's install page names. Every file is checked against
# its hash, whoever sends it.
ARG TORCH_INDEX_URL=
COPY images/worker-cpu.lock /tmp/
RUN test -n "$TORCH_INDEX_URL$PIP_FIND_LINKS" \
    || { echo "worker-cpu: needs TORCH_INDEX_URL, the CPU index that PyTorch's install page names" >&2; exit 1; }
RUN install-locked /tmp/worker-cpu.lock ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}

FROM builder AS worker-cuda-packages
COPY images/worker-cuda.lock /tmp/
RUN install-locked /tmp/worker-cuda.lock

# ---- app: our own wheel, a layer of its own: a new release of ours is a small download -----------------------------
FROM builder AS app
COPY images/build.lock /tmp/
RUN /opt/build/bin/pip install --require-hashes -r /tmp/build.lock
COPY . /src
RUN cd /src \
    && /opt/build/bin/python -m hatchling build -t wheel -d /tmp/wheel \
    && /opt/build/bin/pip --python /opt/baton/bin/python install --no-deps --no-index --target /opt/app \
        /tmp/wheel/*.whl \
    && cp tools/gen_sbom.py /opt/app/bin/ \
    && /opt/baton/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/app \
    && find /opt/app -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

# ---- what all images share ------------------------------------------------------------------------------------------
FROM base AS runtime
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Baton" \
    org.opencontainers.image.description="Disaggregated prefill/decode serving of large language models" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
# Alive is who answers: a worker does so while its model is still loading. Needs metrics_listen on this port.
ENV BATON_HEALTH_PORT=9100
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", "import os, urllib.request as request; request.urlopen(f\"http://127.0.0.1:{os.environ['BATON_HEALTH_PORT']}/livez\", timeout=4)"]
WORKDIR /tmp
ENTRYPOINT ["python", "-P", "-m"]
CMD ["baton.cli", "--help"]

# ---- the images -----------------------------------------------------------------------------------------------------
FROM runtime AS control
ARG VERSION
ARG SOURCE_DATE_EPOCH
COPY --from=control-packages /opt/baton /opt/baton
COPY --from=app /opt/app /opt/app
RUN python -IB /opt/app/bin/gen_sbom.py --image baton/control --version "$VERSION" --out /opt/app/sbom.cdx.json \
    && touch -h -d "@$SOURCE_DATE_EPOCH" /opt/app /opt/app/sbom.cdx.json
USER 65532:65532

FROM runtime AS worker-cpu
ARG VERSION
ARG SOURCE_DATE_EPOCH
COPY --from=worker-cpu-packages /opt/baton /opt/baton
COPY --from=app /opt/app /opt/app
RUN python -IB /opt/app/bin/gen_sbom.py --image baton/worker-cpu --version "$VERSION" --out /opt/app/sbom.cdx.json \
    && touch -h -d "@$SOURCE_DATE_EPOCH" /opt/app /opt/app/sbom.cdx.json
USER 65532:65532

FROM runtime AS worker-cuda
ARG VERSION
ARG SOURCE_DATE_EPOCH
ARG DEBIAN_OF_BASE_DAY
# Triton compiles the launchers of our kernels with the host's C compiler, into /tmp.
RUN install-packages gcc libc6-dev libpython3.11-dev
# Which GPUs is for whoever starts a container to say: a store of this image has none.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=worker-cuda-packages /opt/baton /opt/baton
COPY --from=app /opt/app /opt/app
RUN python -IB /opt/app/bin/gen_sbom.py --image baton/worker-cuda --version "$VERSION" --out /opt/app/sbom.cdx.json \
    && touch -h -d "@$SOURCE_DATE_EPOCH" /opt/app /opt/app/sbom.cdx.json
USER 65532:65532
