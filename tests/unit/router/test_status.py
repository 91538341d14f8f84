"""What a cluster's status says of links that are not as they should be."""

from __future__ import annotations

from protos import common_pb2
from services.router.cluster_status import link_problems

SLOW = {"transport": "grpc", "read_bytes_per_s": 2e6, "floor_bytes_per_s": 1e8, "degraded": True}


def test_a_slow_link_says_what_it_does_and_a_lender_s_only_reads() -> None:
    status = common_pb2.WorkerStatus(worker_id="d")
    status.links.add(node_id="s", write_bytes_per_s=1e6, **SLOW)
    status.links.add(node_id="p/lent", **SLOW)
    status.links.add(node_id="t", read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    assert link_problems(status) == [
        "link of d to store s over grpc is degraded: it writes 1 MB/s and reads 2 MB/s, its floor "
        "is 100 MB/s",
        "link of d to lender p/lent over grpc is degraded: it reads 2 MB/s, its floor is 100 MB/s",
    ]


def test_a_link_that_was_not_measured_says_why() -> None:
    status = common_pb2.WorkerStatus(worker_id="d")
    status.links.add(node_id="p/lent", problem="no blocks are lent")
    assert link_problems(status) == [
        "link of d to lender p/lent was not measured: no blocks are lent"
    ]
