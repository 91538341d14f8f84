"""Prompts and answers in the log, where the setting `log_prompts` asks for it: the one place that
writes what requests say. One line a prompt, one line a message of its answer.
"""

from __future__ import annotations

import logging

from process import logs
from protos import inference_pb2
from services.router.job import Job
from services.router.prompt import PromptEncoder

logger = logging.getLogger(__name__)


def on_prompt(job: Job, encoder: PromptEncoder) -> None:
    """What the model gets, chat template and all, as text."""
    text = encoder.tokenizer.decode(list(job.prompt_token_ids), skip_special_tokens=False)
    logs.event(logger, "prompt", request_id=job.request_id, tenant=job.tenant, text=text)


def on_message(message: inference_pb2.GenerateResponse) -> None:
    """What the client gets, piece by piece."""
    if message.text:
        logs.event(
            logger,
            "answer",
            request_id=message.request_id,
            sample_index=message.sample_index,
            text=message.text,
        )
