#!/bin/sh
# Debian packages into an image, of the base image's day, and nothing left that differs from build to build. Part of
# the Dockerfile.
set -eu
if [ -n "${DEBIAN_OF_BASE_DAY:-}" ]; then
    # A Debian image names, in a comment above each of its mirrors, where that mirror's packages of its own day lie.
    # Signed as ever; only "not valid any more" does not count for a day that is over.
    sources=${DEBIAN_SOURCES:-/etc/apt/sources.list.d/debian.sources}
    awk '/^# http/ { day = $2; next }
        /^URIs:/ { if (day != "") print "URIs: " day "\nCheck-Valid-Until: no"; day = ""; next }
        { print }' "$sources" >"$sources.of-day"
    mv "$sources.of-day" "$sources"
    if ! grep -q '^URIs:' "$sources"; then
        echo "the base image does not say where its day's packages lie: build with DEBIAN_OF_BASE_DAY= for today's" >&2
        exit 1
    fi
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/ldconfig/aux-cache \
    /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /tmp/*
find /usr/lib/python3* -name __pycache__ -prune -exec rm -rf {} +
