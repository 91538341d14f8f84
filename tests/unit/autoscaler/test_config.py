"""What is wrong with an autoscaler's settings is said by its name."""

from __future__ import annotations

import pytest

from process import settings
from process.settings import SettingsError
from services.autoscaler.config import AutoscalerSettings


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["interval_s=0"], "interval_s: must be above 0"),
        (["flip_timeout_s=inf"], "flip_timeout_s: must be finite"),
        (["scaler=local"], "local_address: needed with scaler=local"),
        (["scaler=nomad"], "scaler: expected one of kubernetes, local"),
        (["redis_url="], "redis_url: needed"),
        (["listen=0.0.0.0:8530"], "listen: 0.0.0.0:8530 is reached from other machines"),
        (["listen=here"], "listen: 'here' is not host:port"),
        (["kubernetes.lease_s=5"], "renew_s: must be above retry_s and below lease_s"),
        (["kubernetes.retry_s=10"], "renew_s: must be above retry_s and below lease_s"),
        (["kubernetes.api_url=ftp://x"], "api_url: 'ftp://x' is no"),
        (["kubernetes.decode_deployment=baton-prefill"], "decode_deployment: must be another"),
        (["plan.limits.prefill.max_workers=0"], "max_workers: must be at least 1"),
        (["plan.pace.dwon_s=3"], "unknown key 'dwon_s', nearest is 'down_s'"),
        (["num_decisions_kept=0"], "num_decisions_kept: must be at least 1"),
        (["plan.priors.num_prompt_tokens=0"], "num_prompt_tokens: must be at least 1"),
        (["plan.priors.num_output_tokens=0"], "num_output_tokens: must be at least 1"),
        (["plan.priors.max_num_running=-3"], "max_num_running: must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(overrides: list[str], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.load(AutoscalerSettings, overrides=overrides)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_defaults_are_allowed() -> None:
    made = settings.load(AutoscalerSettings, overrides=["plan.pace.down_s=60"])
    assert made.plan.pace.down_s == 60
    assert made.kubernetes.renew_s < made.kubernetes.lease_s
