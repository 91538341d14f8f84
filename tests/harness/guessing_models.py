"""Targets and those who guess for them, of each kind that settings can name: for tests that serve
them. A FakeModel, where each wrong byte shows; and small random checkpoints."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import checkpoints
from engine.batch import Batch
from engine.config import EngineConfig
from engine.models.interface import Ends, LoadedModel
from engine.models.loader import load_model
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.draft_protocol import DraftModelInfo
from engine.speculation.loader import load_draft_model, load_heads, load_proposers
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer
from engine.speculation.remote import DraftPeer, RemoteProposer
from engine.testing.fake_model import FakeModel
from tests.harness import published_heads as heads
from tests.harness.adapters import save_adapter
from tests.harness.published_eagle3 import LAYERS, eagle3_tensors, save_eagle3
from tests.harness.quantized_fake import SeesQuantized, quantize_fake
from tests.harness.workloads import SIZE, WINDOW

VOCAB = heads.VOCAB
EOS = VOCAB - 1

HEADS = ("medusa", "eagle", "eagle3")
KINDS = {
    "ngram": {"drafters"},
    "draft_model": {"draft_model"},
    "draft_models": {"draft_models"},
    "medusa": {"medusa"},
    "eagle": {"eagle"},
    "eagle3": {"eagle3"},
    "draft_workers": {"draft_workers"},
    "everything": {"drafters", "draft_models", *HEADS, "draft_workers"},
}
"""Who guesses."""


def save_tokenizer(folder: Path) -> None:
    """A token for each byte, two merges, and two that mean something."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|user|>"), AddedToken("<|end|>")])
    assert backend.get_vocab_size() == VOCAB and backend.token_to_id("<|end|>") == EOS
    backend.save(str(folder / "tokenizer.json"))


def save_heads(folder: Path) -> dict[str, str]:
    """Random ones, by kind. Their logits are small, so that the noise of a hot request, which the
    target's draws share, decides: then they are right now and then."""
    num_drafted = 200
    medusa, eagle = heads.medusa_tensors(), heads.eagle_tensors()
    eagle3 = eagle3_tensors(num_drafted=num_drafted)
    for name, tensor in medusa.items():
        tensor *= 0.02 if name.count(".") == 2 else 1.0
    for name, tensor in eagle.items():
        tensor *= 0.02 if "proj" in name or name.startswith("fc") else 1.0
    eagle3["lm_head.weight"] *= 0.02
    return {
        "medusa": str(heads.save_medusa(folder / "medusa", medusa)),
        "eagle": str(heads.save_eagle(folder / "eagle", eagle)),
        "eagle3": str(save_eagle3(folder / "eagle3", eagle3, draft_vocab_size=num_drafted)),
    }


def save_llama(folder: Path, rng: random.Random, *, like: Any = None) -> Any:
    """A random checkpoint that heads fit on; `like`: one that it mostly agrees with."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=heads.HIDDEN,
        intermediate_size=heads.INNER,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=heads.NUM_HEADS,
        num_key_value_heads=heads.NUM_KV_HEADS,
        max_position_embeddings=4 * WINDOW,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
        dtype="float32",
        initializer_range=0.3,  # logits are far apart, as a trained model's are
    )
    torch.manual_seed(rng.getrandbits(62))
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    if like is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                own = like.get_parameter(name)
                parameter.copy_(own + 0.1 * own.std().nan_to_num(0.0) * torch.randn(own.shape))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


class FakeTarget(FakeModel):
    """With a real tokenizer's ids, and ends that heads fit on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            vocab_size=VOCAB,
            context_window=WINDOW,
            block_size=SIZE,
            eos_token_ids=(EOS,),
            hidden_size=heads.HIDDEN,
        )
        self.info = replace(
            self.info, model=folder.name, tokenizer_digest=checkpoints.tokenizer_digest(folder)
        )
        generator = torch.Generator().manual_seed(1)
        self._table = torch.randn(VOCAB, heads.HIDDEN, generator=generator)

    @property
    def ends(self) -> Ends:
        return Ends(
            heads.HIDDEN,
            lambda ids: self._table[ids],
            lambda x: x @ self._table.T,
            num_layers=len(LAYERS),
        )


class QuantizedTarget(SeesQuantized, FakeTarget):
    """Over a quantized cache, with scales of this kind."""

    def __init__(self, folder: Path, scale: str) -> None:
        super().__init__(folder)
        quantize_fake(self, scale)


class Unreliable(FakeTarget):
    """Draws as a FakeTarget after most texts."""

    def __init__(self, folder: Path, salt: bytes) -> None:
        super().__init__(folder)
        self._salt = salt
        own = hashlib.blake2b(self.info.fingerprint.encode(), key=salt).hexdigest()
        self.info = replace(self.info, fingerprint=own)

    def _logits(self, history: bytes, last_token_id: int) -> torch.Tensor:
        told = hashlib.blake2b(history, digest_size=1, key=self._salt).digest()
        return super()._logits(history if told[0] < 200 else self._salt + history, last_token_id)


class Nudged:
    """A model whose logits are off by `most` at the most, at random."""

    def __init__(self, model: LoadedModel, most: float, seed: int) -> None:
        self._model = model
        self._most = most
        self._generator = torch.Generator().manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self._model.forward(batch)
        return logits + self._most * (2 * torch.rand(logits.shape, generator=self._generator) - 1)


def random_speculation(
    kind: str, rng: random.Random, *, names: Sequence[str], heads: dict[str, str]
) -> SpeculationConfig:
    """Settings of one kind, but for the addresses of draft workers.

    Args:
        names: of draft models.
        heads: folders by kind.
    """
    who = KINDS[kind]
    num_drafts = 2 if "draft_models" in who else int("draft_model" in who)
    return SpeculationConfig(
        drafters=("ngram",) if "drafters" in who else (),
        draft_models=tuple(names[:num_drafts]),
        draft_heads=tuple(heads[one] for one in HEADS if one in who),
        expansion=tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 4))),
        draft_deadline_s=20.0,
        max_num_nodes=rng.randint(1, 12),
        acceptance=rng.choice(["exact", "exact", "naive", "multi_step"]),
        always=rng.random() < 0.85,
        ngram=NgramConfig(min_length=rng.randint(1, 2), max_matches=rng.randint(1, 4)),
    )


class FakeMaker:
    """Everything of FakeModels; heads are loaded from their checkpoints.

    Args:
        kv_scale: targets have a quantized cache with such scales; "": one as computed.
    """

    is_to_the_bit = True
    adapters: tuple[str, ...] = ()
    """Each as "name=folder"."""

    def __init__(self, folder: Path, *, kv_scale: str = "") -> None:
        self.kv_scale = kv_scale
        self.folder = folder / "fake"
        self.folder.mkdir()
        save_tokenizer(self.folder)
        (self.folder / "config.json").write_text("{}")
        self.heads = save_heads(folder)
        self.draft_names = ("first", "second")

    def config(self, **fields: Any) -> EngineConfig:
        return EngineConfig(
            model=str(self.folder), block_size=SIZE, context_window=WINDOW, **fields
        )

    def model(self, place: str) -> LoadedModel:
        """For the worker at that place, or for whoever is alone."""
        if self.kv_scale:
            return QuantizedTarget(self.folder, self.kv_scale)
        return FakeTarget(self.folder)

    def proposers(
        self, config: EngineConfig, model: LoadedModel, peers: Sequence[DraftPeer]
    ) -> list[Proposer]:
        """Those that the settings name, in the order of `load_engine`. Not on the loop."""
        wanted = config.speculation
        made: list[Proposer] = [NgramProposer(wanted.ngram) for _ in wanted.drafters]
        made += [self._draft(name, config) for name in wanted.draft_models]
        if peers:
            remote = RemoteProposer(peers, model.info, deadline_s=wanted.draft_deadline_s)
            remote.connect()
            made.append(remote)
        return made + load_heads(config, model)

    def served(self, name: str, config: EngineConfig) -> tuple[DraftModelProposer, DraftModelInfo]:
        """A draft worker's."""
        model = self._draft(name, config)
        info = model.info
        return model, DraftModelInfo(info.model, info.tokenizer_digest, info.vocab_size)

    def _draft(self, name: str, config: EngineConfig) -> DraftModelProposer:
        return DraftModelProposer(
            Unreliable(self.folder, name.encode()),
            config.speculation.expansion,
            num_blocks=8 * WINDOW // SIZE,
            max_num_tokens=64,
        )


class CheckpointMaker:
    """Small random checkpoints, loaded as settings name them, with an adapter."""

    is_to_the_bit = False

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder / "target"
        target = save_llama(self.folder, rng)
        self.draft_names = tuple(str(folder / f"draft-{index}") for index in range(2))
        for name in self.draft_names:
            save_llama(Path(name), rng, like=target)
        self.heads = save_heads(folder)
        adapter = save_adapter(folder / "adapter", target, rng.getrandbits(30))
        self.adapters = (f"tales={adapter}",)
        self._models: dict[str, LoadedModel] = {}

    def config(self, **fields: Any) -> EngineConfig:
        return EngineConfig(
            model=str(self.folder),
            device="cpu",
            dtype="float32",
            block_size=SIZE,
            context_window=WINDOW,
            num_threads=1,
            **fields,
        )

    def model(self, place: str) -> LoadedModel:
        """One after the other may have the same."""
        if place not in self._models:
            self._models[place] = load_model(self.config())
        return self._models[place]

    def proposers(
        self, config: EngineConfig, model: LoadedModel, peers: Sequence[DraftPeer]
    ) -> list[Proposer]:
        """As FakeMaker's."""
        return load_proposers(config, model.info, None, peers) + load_heads(config, model)

    def served(self, name: str, config: EngineConfig) -> tuple[DraftModelProposer, DraftModelInfo]:
        """As FakeMaker's."""
        model = load_draft_model(replace(config, model=name, context_window=0))
        info = model.info
        return model, DraftModelInfo(info.model, info.tokenizer_digest, info.vocab_size)


Maker = FakeMaker | CheckpointMaker
