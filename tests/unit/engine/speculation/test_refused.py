"""What guesses do not go with is refused by name where an engine is loaded as its settings say, and
leaves nothing behind. (Each refusal by itself: beside what refuses.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.errors import LoadError
from engine.loop import load_engine
from engine.speculation.config import SpeculationConfig
from process.settings import SettingsError
from tests.parity.models import FAMILIES, save
from tests.unit.engine.speculation.heads.published import save_medusa

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


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"kv_dtype": "int8", "exact": True, "decoder": "own"},
            "speculation: not with exact=true and kv_dtype=int8",
        ),
        (
            {
                "exact": True,
                "decoder": "own",
                "speculation": replace(NGRAM, acceptance="multi_step"),
            },
            "acceptance: multi_step is not for exact=true",
        ),
    ],
)
def test_settings_that_guesses_do_not_go_with(
    config: EngineConfig, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        load_engine(replace(config, **{"speculation": NGRAM} | fields))


@pytest.mark.long
def test_heads_on_a_model_that_several_ranks_share(config: EngineConfig, tmp_path: Path) -> None:
    wanted = SpeculationConfig(draft_heads=(str(save_medusa(tmp_path / "medusa")),))
    before = set(psutil.Process().children())
    with pytest.raises(LoadError, match=r"draft_heads: .* several ranks share .*tensor_parallel"):
        load_engine(replace(config, decoder="own", tensor_parallel=2, speculation=wanted))
    _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=60)
    assert not alive
