"""Model: a checkpoint that the router serves, as far as it needs it: no weights."""

from __future__ import annotations

import checkpoints
from checkpoints.sampling_defaults import SamplingDefaults
from process.settings import SettingsError
from services.router import sampling_defaults
from services.router.views import ServedModel
from tokens.chat_template import ChatTemplate
from tokens.errors import TokensError
from tokens.tokenizer import Tokenizer


class Model:
    """Names, tokenizer, template, defaults."""

    def __init__(
        self,
        name: str,
        *,
        served: ServedModel,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
    ) -> None:
        self.name = name
        self.served = served
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults


def load_model(model: str) -> Model:
    """Find the checkpoint and read its tokenizer files; blocking.

    Raises: SettingsError, one line: what is wrong with `model` and how to fix it.
    """
    try:
        checkpoint = checkpoints.resolve(model, files="tokenizer")
        return Model(
            checkpoint.name,
            served=ServedModel(
                (checkpoint.name, model), checkpoints.tokenizer_digest(checkpoint.path)
            ),
            tokenizer=Tokenizer.load(checkpoint.path),
            template=ChatTemplate.find(checkpoint.path),
            defaults=sampling_defaults.read_defaults(checkpoint.path),
        )
    except (checkpoints.CheckpointError, TokensError) as error:
        raise SettingsError(f"model: {error}") from error
