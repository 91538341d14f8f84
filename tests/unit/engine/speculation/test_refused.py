"""What guesses do not go with is refused by name where an engine is loaded as its settings say, and
leaves nothing behind. (Each refusal by itself: beside what refuses.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.engine import load_engine
from engine.errors import LoadError
from engine.speculation.config import SpeculationConfig
from process.settings import SettingsError
from tests.harness.models import FAMILIES, save
from tests.harness.published_heads import save_medusa

NGRAM = SpeculationConfig(drafters=("ngram",))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("target") / "target"
    save(FAMILIES["llama"](), folder, 1)
    return EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        block_size=8,
        num_blocks=16,
        context_window=48,
        num_threads=1,
    )


def test_multi_step_does_not_keep_the_promise_of_exact(config: EngineConfig) -> None:
    wanted = replace(NGRAM, acceptance="multi_step")
    with pytest.raises(SettingsError, match="acceptance: multi_step is not for exact=true"):
        load_engine(replace(config, exact=True, decoder="own", speculation=wanted))


@pytest.mark.long
def test_heads_on_a_model_that_several_ranks_share(config: EngineConfig, tmp_path: Path) -> None:
    wanted = SpeculationConfig(draft_heads=(str(save_medusa(tmp_path / "medusa")),))
    before = set(psutil.Process().children())
    with pytest.raises(LoadError, match=r"draft_heads: .* several ranks share .*tensor_parallel"):
        load_engine(replace(config, decoder="own", tensor_parallel=2, speculation=wanted))
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=60)
    assert not alive
