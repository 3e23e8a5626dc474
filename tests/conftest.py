"""Hypothesis profiles: `quick` by default; HYPOTHESIS_PROFILE=deep or `--hypothesis-profile=deep` for longer runs."""

import os

from hypothesis import HealthCheck, Phase, settings

common = settings(
    deadline=None,  # the machines that tests run on are busy
    suppress_health_check=[HealthCheck.too_slow],
    phases=set(Phase) - {Phase.explain},  # which takes longer than to find and to shrink
)
settings.register_profile("quick", common, max_examples=60, stateful_step_count=25)
settings.register_profile("deep", common, max_examples=400, stateful_step_count=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
