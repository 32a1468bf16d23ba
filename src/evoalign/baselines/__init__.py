# SPDX-License-Identifier: Apache-2.0
"""GRPO, PPO and DPO on the same tasks and in the same run directories as ES. `trainer`, `ppo` and `dpo` import TRL."""
