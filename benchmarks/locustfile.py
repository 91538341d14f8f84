"""Load over the OpenAI API with Locust, for users of Locust.

    pip install locust
    locust -f benchmarks/locustfile.py --headless --users 16 --spawn-rate 2 --run-time 60s \\
        --host http://127.0.0.1:8501

A user waits for each answer before the next question (a closed loop), so an overload shows as fewer
requests rather than as longer queues: for latency at a given rate, `baton bench serve`.
`first token` is when the first line of an answer came, `answer` when it was whole (`completion`,
which Locust measures itself, is when headers came); a stream that ends in an error is a failure.
Not part of the tests, and no dependency of Baton's.
"""

from __future__ import annotations

import json
import os
import random
import time

from locust import HttpUser, between, task

MODEL = os.environ.get("BATON_MODEL", "baton-5m")
API_KEY = os.environ.get("BATON_API_KEY", "none")
NUM_OUTPUT_TOKENS = int(os.environ.get("BATON_OUTPUT_LEN", "64"))
_WORDS = "time girl dog tree house river small old red friend walked saw found happy rain".split()


class Reader(HttpUser):  # type: ignore[misc]
    """A user of locust that sends a request, reads the stream to its end, and sends the next."""

    wait_time = between(0.5, 2.0)

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        """Send one streamed completion of a prompt that is in no cache."""
        prompt = "Once upon a time " + " ".join(random.choices(_WORDS, k=48))
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": NUM_OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        begin_s = time.perf_counter()
        has_begun = False
        with self.client.post(
            "/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {API_KEY}"},
            stream=True,
            catch_response=True,
            name="completion",
        ) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            is_whole = False
            for line in response.iter_lines():
                if not line.startswith(b"data: "):
                    continue
                if not has_begun:
                    self._tell("first token", begin_s)
                    has_begun = True
                if line == b"data: [DONE]":
                    is_whole = True
                elif "error" in json.loads(line[6:]):
                    response.failure(line[6:206].decode(errors="replace"))
                    return
            if is_whole:
                self._tell("answer", begin_s)
            else:
                response.failure("the stream broke off")

    def _tell(self, what: str, begin_s: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=what,
            response_time=(time.perf_counter() - begin_s) * 1000,
            response_length=0,
            exception=None,
            context={},
        )
