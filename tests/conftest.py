"""Hypothesis profiles: `quick` by default; HYPOTHESIS_PROFILE=deep or `--hypothesis-profile=deep` for longer runs."""

import os

from hypothesis import HealthCheck, settings

_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])

settings.register_profile("quick", _ANY_SPEED, max_examples=60, stateful_step_count=40)
settings.register_profile("deep", _ANY_SPEED, max_examples=3000, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
